"""One model is loaded at a time in a process.

While transformers builds a model it replaces methods of its classes and puts them back afterwards. Two threads that do
so at once can put back the wrong ones, and from then on every model of the process comes without its tied weights.
"""

import threading

MODEL_LOADING = threading.RLock()
"""Held around everything that builds a model through transformers."""
