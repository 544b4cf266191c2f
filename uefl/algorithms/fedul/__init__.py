"""FedUL, its bi-objective forms and baselines: learning from unlabeled sets with known class shares.

Sources: Lu et al. 2022, "Federated Learning from Only Unlabeled Data with Class-Conditional-Sharing Clients"
(FedUL); Alzahrani 2024, "A Bi-Objective Optimization Approach for Enhancing FedUL" (M1, M2). docs/fedul.md
explains our choices.
"""
