//! Reports pods whose containers are not created for a long time.
//!
//! Until a pod's volumes are mounted and its images are pulled, its containers wait without an
//! error. The kubelet reports the cause only in events, which the operator must not read, so the
//! message names the command that shows them.

use stoker_api::time::Timestamp;

use super::ObservedPod;

/// Minutes of waiting after which a pod is first reported. The message then changes each time the
/// wait has doubled, so that a long wait causes few writes.
const REPORTED_MINUTES_MIN: u64 = 2;

/// Returns the message about the pod whose containers have waited longest; `None` if no pod has
/// waited long.
pub(crate) fn late_message<'a>(
    pods: impl Iterator<Item = &'a ObservedPod>,
    now: Timestamp,
) -> Option<String> {
    let waiting = pods.filter_map(|pod| Some((pod.creating_since?, &pod.name)));
    let (since, name) = waiting.min()?;
    let minutes = reported_minutes(since, now)?;
    Some(format!(
        "the containers of pod {name} have been waiting for more than {minutes} minutes to be \
         created, usually for a volume or an image; `kubectl describe pod {name}` shows the cause"
    ))
}

/// Returns when the message about a pod changes next; `None` if its containers do not wait.
pub(crate) fn next_change(pod: &ObservedPod, now: Timestamp) -> Option<Timestamp> {
    let since = pod.creating_since?;
    let minutes = reported_minutes(since, now).map_or(REPORTED_MINUTES_MIN, |minutes| 2 * minutes);
    Some(since.plus(60 * minutes))
}

fn reported_minutes(since: Timestamp, now: Timestamp) -> Option<u64> {
    let waited = now.seconds_since(since) / 60;
    let doublings = (waited / REPORTED_MINUTES_MIN).checked_ilog2()?;
    Some(REPORTED_MINUTES_MIN << doublings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, since: i64) -> ObservedPod {
        let creating_since = Some(Timestamp(since));
        ObservedPod { name: name.to_owned(), creating_since, ..ObservedPod::default() }
    }

    #[test]
    fn late_pods_are_reported_at_doubled_waits() {
        let check = |now: i64, minutes: Option<u64>, next: i64| {
            let (pod, now) = (pod("a", 1000), Timestamp(now));
            let message = late_message([&pod].into_iter(), now);
            let expected = minutes.map(|minutes| {
                format!(
                    "the containers of pod a have been waiting for more than {minutes} minutes to \
                     be created, usually for a volume or an image; `kubectl describe pod a` shows \
                     the cause"
                )
            });
            assert_eq!((message, next_change(&pod, now)), (expected, Some(Timestamp(next))));
        };
        check(0, None, 1120);
        check(1000, None, 1120);
        check(1119, None, 1120);
        check(1120, Some(2), 1240);
        check(1239, Some(2), 1240);
        check(1240, Some(4), 1480);
        check(1480, Some(8), 1960);
        check(1000 + 86_400, Some(1024), 1000 + 2048 * 60);
    }

    #[test]
    fn the_longest_wait_is_reported() {
        let check = |pods: &[ObservedPod], expected: Option<&str>| {
            let message = late_message(pods.iter(), Timestamp(300));
            let name = message.as_ref().and_then(|message| message.split(' ').nth(4));
            assert_eq!(name, expected, "{pods:?}");
        };
        check(&[pod("c", 10), pod("b", 9), pod("a", 10)], Some("b"));
        check(&[pod("b", 9), pod("a", 9)], Some("a"));
        check(&[pod("a", 200), ObservedPod::default()], None);
        check(&[ObservedPod::default()], None);
        assert_eq!(next_change(&ObservedPod::default(), Timestamp(300)), None);
    }
}
