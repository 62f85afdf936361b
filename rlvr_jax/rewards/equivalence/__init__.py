"""Whether two mathematical answers are the same.

``notation`` unifies spelling, ``grammar`` reads an answer into ``terms`` (or refuses it), ``values`` compares scalars
and ``compare`` everything else.
"""
