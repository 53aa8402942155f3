"""The subject: who owns which slots. Pool (pages), Cache (slot algebra for a batch), policies/ (what to forget).

Contracts. A page is taken and given back in arrays, never one by one; the pool's accountant must balance after every
step. A policy is one file, found by its name. What is not known here: text, sampling, layers' arithmetic; K and V are
opaque.
"""
