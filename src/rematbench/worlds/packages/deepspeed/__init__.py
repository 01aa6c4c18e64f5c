"""worlds/packages/deepspeed"""
