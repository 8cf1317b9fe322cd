"""Words shared by all epilora processes: config, placement, load spec, adapter formats, slice files, wire, errors, RPC.

Imports no service, and no torch: a process that never computes stays small.
"""

__version__ = "0.1.0"
