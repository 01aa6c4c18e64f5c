"""The executed world: a torch runtime that runs lowered actions.  The only torch imports here.

It reads the actions, the operator tables and the partition; it knows no method and no fate.
"""
