//! Detects outages in which most nodes are not ready, probably because they cannot reach the API
//! server. See `docs/decisions/0064-node-outages.md`.

use stoker_api::time::Timestamp;

/// Share of nodes that are not ready in an outage, in percent. The same number as the default of
/// `--unhealthy-zone-threshold` of Kubernetes' controller manager.
const OUTAGE_PERCENT: usize = 55;
/// Number of not-ready nodes that is no outage, if other nodes are ready.
const NODES_NOT_READY_MAX: usize = 2;
/// Seconds after which a node that is not ready counts as switched off when an outage begins.
const OFF_SECONDS: u64 = 24 * 3600;

/// Numbers of nodes of the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Nodes that are ready.
    pub ready: usize,
    /// Nodes that are not ready, except those that are switched off.
    pub not_ready: usize,
}

impl NodeCounts {
    /// Counts nodes, given when each of them became not ready; `None` if it is ready. `reference`
    /// is the time at which the outage began, if there is one, or else the current time.
    pub fn of(nodes: impl Iterator<Item = Option<Timestamp>>, reference: Timestamp) -> Self {
        let mut counts = Self::default();
        for not_ready_since in nodes {
            match not_ready_since {
                None => counts.ready += 1,
                Some(since) if reference.seconds_since(since) < OFF_SECONDS => {
                    counts.not_ready += 1;
                }
                Some(_) => {}
            }
        }
        counts
    }

    /// Returns whether the nodes probably cannot reach the API server, instead of having failed: no
    /// node is ready, or at least 55 % and more than two are not. Pods on them probably run.
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

    #[test]
    fn nodes_that_are_switched_off_do_not_count() {
        let day = 24 * 3600;
        let nodes = [None, Some(0), Some(1), Some(day), None];
        let counts = |now| NodeCounts::of(nodes.map(|since| since.map(Timestamp)).into_iter(), now);
        assert_eq!(counts(Timestamp(day - 1)), NodeCounts { ready: 2, not_ready: 3 });
        assert_eq!(counts(Timestamp(day)), NodeCounts { ready: 2, not_ready: 2 });
        assert_eq!(counts(Timestamp(3 * day)), NodeCounts { ready: 2, not_ready: 0 });
    }
}
