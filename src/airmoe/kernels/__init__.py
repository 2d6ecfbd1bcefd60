"""The operations under routers and experts, one folder each.

`reference.py` in a folder is plain PyTorch: the definition of correct, and the CPU path.
The folder's public function checks its arguments and picks an implementation.
"""
