"""Reads, checks and slices adapter files, and keeps the slices in shared memory. Touches no GPU, imports no torch.

One call's way: `servicer` (gRPC) -> `builder` (one build for equal calls, leases) -> `build` (in a thread: `source`
opens the files, `epilora.adapters` understands them, `writer` copies) -> `cache` (budget, publishing, removal).
"""
