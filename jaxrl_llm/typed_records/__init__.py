"""Typed records, of which a config is made: how values are checked, read from text, and named.

What a record is, and one of several kinds: record.py. Types with bounds, and text that becomes
values: bounds.py. The words for a wrong value: messages.py. Records as a tree with dotted keys:
tree.py. `KEY=VALUE`: overrides.py. Functions and rows of a Python program: python_objects.py.
"""
