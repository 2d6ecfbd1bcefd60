"""`airmoe bench`: granular layers side by side on one GPU, right answers only."""
