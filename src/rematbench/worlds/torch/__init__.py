"""worlds/torch"""
