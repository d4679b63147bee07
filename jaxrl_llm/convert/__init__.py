"""Configs of other libraries: their command lines read, and written as a config of ours."""
