"""The executed world: a torch runtime that runs lowered actions.

Within src only this folder imports torch. The runtime reads the actions, the operator tables and
the partition; it does not depend on methods or fates.
"""
