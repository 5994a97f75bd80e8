"""The search for the strategy with the least predicted time, by the cost model.

Words of its files: a *leaf* is a part of a dimension that mesh axes can split (a dimension of heads
x width has two), of a tensor or of a node's rule. An *atom* is the index that leaves of different
tensors and nodes have in common, such as the tokens. A *factor sharding* is the axes that split
each leaf of a tensor. A *strategy* of a node is the axes that split each of the node's leaves, from
which the shardings of its operands and results follow. The search chooses a strategy for each node,
so that compute and the reshards between nodes take least time.
"""
