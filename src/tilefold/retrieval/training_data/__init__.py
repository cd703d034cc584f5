"""Training data: mined negatives, teachers' scores and files of training rows."""
