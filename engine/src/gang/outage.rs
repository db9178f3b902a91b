//! Detects outages in which most nodes are not ready, probably because they cannot reach the API
//! server. See `docs/decisions/0064-node-outages.md`.

use stoker_api::time::Timestamp;

/// Share of nodes that are not ready in an outage, in percent. The same number as the default of
/// `--unhealthy-zone-threshold` of Kubernetes' controller manager.
const OUTAGE_PERCENT: usize = 55;
/// While other nodes are ready, up to this number of not-ready nodes are no outage.
const NOT_READY_MAX: usize = 2;
/// Seconds within which the nodes of one outage become not ready.
const WINDOW_SECONDS: u64 = 3600;

/// Returns whether nodes probably cannot reach the API server, instead of having failed: no node is
/// ready, or at least 55 % and more than two became not ready within an hour. Pods on them probably
/// run. Nodes that became not ready at other times count neither as ready nor as not ready.
///
/// `not_ready_since` are the times at which the other nodes became not ready. The result depends
/// only on the nodes, so all replicas agree, also after a restart.
pub fn are_nodes_unreachable(num_ready: usize, mut not_ready_since: Vec<Timestamp>) -> bool {
    not_ready_since.sort_unstable();
    let num_together = |first: usize| {
        let times = &not_ready_since[first..];
        times.partition_point(|time| time.seconds_since(times[0]) <= WINDOW_SECONDS)
    };
    let num = (0..not_ready_since.len()).map(num_together).max().unwrap_or_default();
    let are_most = num * 100 >= (num_ready + num) * OUTAGE_PERCENT;
    num > 0 && (num_ready == 0 || (num > NOT_READY_MAX && are_most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_nodes_do_not_fail_together() {
        for (num_ready, num_not_ready, expected) in [
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
            let times = vec![Timestamp(7); num_not_ready];
            let is_outage = are_nodes_unreachable(num_ready, times);
            assert_eq!(is_outage, expected, "{num_ready} {num_not_ready}");
        }
    }

    #[test]
    fn nodes_of_an_outage_fail_within_an_hour() {
        let check = |num_ready: usize, times: &[i64], expected: bool| {
            let times: Vec<Timestamp> = times.iter().copied().map(Timestamp).collect();
            assert_eq!(are_nodes_unreachable(num_ready, times), expected, "{num_ready}");
        };
        check(2, &[0, 3600, 1800], true);
        check(2, &[0, 3601, 1800], false);
        // Nodes that were switched off one after the other, and one that has failed.
        check(3, &[0, 90_000, 180_000, 270_000, 360_000], false);
        check(3, &[0, 90_000, 180_000, 180_001, 180_002, 180_003], true);
        check(0, &[0, 90_000], true);
    }
}
