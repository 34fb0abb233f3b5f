"""`trn check`: is a trainer class sound, and does it resume exactly?"""
