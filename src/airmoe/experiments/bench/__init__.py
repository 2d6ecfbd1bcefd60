"""`airmoe bench`: times granular layers side by side, after checking their answers."""
