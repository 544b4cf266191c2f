"""UEFL: a shared codebook for all, more codewords for the clients that the model is uncertain about.

Source: Zhang, Cao and Liu, "Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
Heterogeneous Data Silos" (ICML 2025, arXiv 2402.18888), with what its text leaves open or its code gets wrong
settled as docs/uefl.md says.

``quantizer``   from features to codewords, and how codewords learn
``client``      the client half: training and measuring behind a codebook, new codewords by k-means
``extension``   whose codebook grows
``findings``    what a report says of extensions
``unseen``      which codebook a client is measured with that has none of its own
``uefl``        the server half, and the parameters
"""
