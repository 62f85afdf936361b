"""Whether two mathematical answers are the same.

``notation`` unifies spelling, ``grammar`` (with ``commands`` and ``expression``) reads an answer into ``terms``, or
refuses it, ``values`` compares scalars, ``intervals`` sets of reals and ``compare`` everything else.
"""
