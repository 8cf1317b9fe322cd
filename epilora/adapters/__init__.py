"""Adapter files -> normal form: what PEFT and others write, read strictly, as pairs of A and B for each expert.

The walk: `open` bytes -> `safetensors_header` (what tensors there are) + `peft_config` (what they mean) ->
`keys` (module paths) -> `resolve` (which pair of which expert; `per_expert`, `stacked`, `dense` know the layouts)
-> `NormalForm` -> `slice_plan` (which bytes go where in each rank's slice file).
docs/adapters.md says what is accepted and what is refused.
"""
