"""What `moaspec data stats` and `overlap` find in training data, in a checkout."""
