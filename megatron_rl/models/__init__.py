"""Model families, one file per family: tensor shapes, parameter names, their sharding over ranks, and Megatron-core
settings.

- family.py defines what a family is. registry.py finds the families.
- rows.py and partitions.py define how a parameter is described. blocks.py holds the layers that several families share.
- divisibility.py checks which layouts a model allows.

Every module of this package with a `FAMILY` constant defines a model family. See docs/how_to/adding_a_model.md.
"""
