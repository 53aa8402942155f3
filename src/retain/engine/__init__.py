"""Who computes what, and when. Requests owe tokens; a step pays some of the debts and draws the next tokens.

What is not known here: text, files, HTTP, and the bytes of K and V.
"""
