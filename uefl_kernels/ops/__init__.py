"""One folder per op: ``__init__.py`` (public function, schema, autograd), ``reference.py``, ``triton.py``."""
