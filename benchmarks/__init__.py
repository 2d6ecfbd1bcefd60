"""Speed and memory of airmoe beside the alternatives (`make bench`)."""
