"""`make gpu-check`: what headrace does on a GPU, checked and measured in at most eight minutes."""
