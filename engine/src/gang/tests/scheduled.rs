//! The time from which the slots of an attempt count.

use super::*;

/// The operator may see the pods of an attempt only long after they were scheduled.
#[test]
fn slots_count_from_the_last_scheduled_pod() {
    let check = |scheduled_at: [Option<i64>; 2], expected: i64| {
        let mut pods = ["0@0R", "1@0P"].map(pod);
        for (pod, at) in pods.iter_mut().zip(scheduled_at) {
            pod.scheduled_at = at.map(Timestamp);
        }
        let mut record = record("live");
        record.status.attempts[0].started_at = Some(Timestamp(10));
        let plan = plan(&view(&record, &pods, 120));
        let ungated_at = plan.record.status.attempts[0].ungated_at;
        assert_eq!(ungated_at, Some(Timestamp(expected)), "{scheduled_at:?}");
    };
    check([Some(13), Some(15)], 15);
    check([Some(13), None], 120);
    // The clocks of the API server and the operator may differ.
    check([Some(3), Some(5)], 10);
    check([Some(13), Some(130)], 120);
}
