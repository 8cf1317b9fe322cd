"""torch's collectives of one tensor a rank, under the names that every torch in use has.

torch 2.13 calls them all_gather_single and reduce_scatter_single, and warns of the old names; 2.11 has no others.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(received [G * n, ...], send [n, ...], group, async_op): everybody's rows, in order of rank."""
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(received [n, ...], send [G * n, ...], op, group, async_op): this rank's rows of the sum over ranks."""
