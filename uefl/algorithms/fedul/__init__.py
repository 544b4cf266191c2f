"""FedUL, its bi-objective extensions, and their baselines: learning from unlabeled sets whose class shares
are known.

Sources: Lu et al. 2022, "Federated Learning from Only Unlabeled Data with Class-Conditional-Sharing Clients"
(FedUL); Alzahrani 2024, "A Bi-Objective Optimization Approach for Enhancing FedUL" (M1, M2). docs/fedul.md
says what they leave open.
"""
