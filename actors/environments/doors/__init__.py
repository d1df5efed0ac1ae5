"""Doors for environment authors: a data set and a reward, functions as tools, a class of one's own."""
