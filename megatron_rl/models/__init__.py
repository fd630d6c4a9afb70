"""Model families, one file each: shapes, names in every form, settings of Megatron-core, and the rules of their cuts.

family.py says what a family is, rows.py and partitions.py what a parameter is, blocks.py holds the parts that families
share, registry.py finds the families, and divisibility.py says which layouts a model allows. A file with a `FAMILY` is
a family. docs/adding_a_model.md
"""
