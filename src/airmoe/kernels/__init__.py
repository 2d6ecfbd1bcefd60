"""The operations under routers and experts, one folder each.

`reference.py` in a folder is plain PyTorch: the definition of correct, and the CPU path.
The folder's public function says what it takes and gives, and is the place where an
implementation is picked; today there is one.
"""
