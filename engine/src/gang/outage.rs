//! Whether so many nodes are not ready that rather the connection to them has failed.

/// Share of nodes that are not ready in an outage, in percent. The same as the default of
/// `--unhealthy-zone-threshold` of Kubernetes' controller manager, which then evicts fewer pods, or
/// none.
const OUTAGE_PERCENT: usize = 55;
/// In an outage with ready nodes, more than this number of nodes are not ready.
const NODES_NOT_READY_MAX: usize = 2;

/// Numbers of nodes of the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Nodes that are ready.
    pub ready: usize,
    /// Nodes that are not ready.
    pub not_ready: usize,
}

impl NodeCounts {
    /// Returns whether the nodes rather cannot reach the API server than have failed: no node is
    /// ready, or at least 55 % and more than two are not. Pods on them probably run.
    pub fn are_unreachable(self) -> bool {
        let Self { ready, not_ready } = self;
        let are_most = not_ready * 100 >= (ready + not_ready) * OUTAGE_PERCENT;
        not_ready > 0 && (ready == 0 || (not_ready > NODES_NOT_READY_MAX && are_most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_nodes_do_not_fail_together() {
        for (ready, not_ready, expected) in [
            (0, 0, false),
            (5, 0, false),
            (0, 1, true),
            (0, 9, true),
            (1, 1, false),
            (1, 2, false),
            (1, 3, true),
            (3, 3, false),
            (45, 54, false),
            (45, 55, true),
        ] {
            let counts = NodeCounts { ready, not_ready };
            assert_eq!(counts.are_unreachable(), expected, "{counts:?}");
        }
    }
}
