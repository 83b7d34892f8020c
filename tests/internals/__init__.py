"""The parts of the library that its own tests use beyond the public names, one module for each package.

Tests import them from here, so that a definition that moves to another file changes one line of this folder and no
test.
"""
