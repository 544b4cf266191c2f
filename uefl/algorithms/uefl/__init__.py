"""UEFL: a shared codebook for all clients, and more codewords for clients that the model is uncertain about.

Source: Zhang, Cao and Liu, "Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos" (ICML 2025, arXiv 2402.18888). docs/uefl.md lists our choices where the text is open
or the published code differs from it.
"""
