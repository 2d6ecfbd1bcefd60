"""The operations under routers and experts, one folder each.

`reference.py` in a folder is plain PyTorch: the definition of correct, and the CPU path. Files that
end in `triton.py` hold the GPU's kernels. The folder's public function says what it takes and
gives, and picks one of the two (`backend.py`).
"""
