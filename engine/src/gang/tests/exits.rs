//! Gangs of which some pods have ended.

use super::text::record;
use super::{check, plan_of};
use crate::trial::live_attempt;

#[test]
fn rank_0_may_store_after_clean_exits() {
    check("made", "0@0R 1@0E79", 120, "wake=3559");
    check("made", "0@0R 1@0C7", 120, "wake=3487");
    check("made", "0@0RD700 1@0E79", 120, "wake=3559");
    let late = "end=Preempted:Preempted delete=t-a0-r0:30 wake=600";
    check("made", "0@0R 1@0E79", 3679, late);
    // Other pods store nothing.
    check("made", "0@0E79 1@0R", 108, "wake=1");
    check("made", "0@0E79 1@0R", 109, &late.replace("r0", "r1"));
    // A gang that has not started has trained nothing.
    check("made", "0@0S 1@0E79", 109, late);
}

#[test]
fn lost_nodes_are_noticed_after_clean_exits() {
    check("made", "0@0RN 1@0E79", 120, "delete=t-a0-r0:30 wake=1");
    let lost = "begin=1 create=[0, 1] delete=t-a0-r0:0 wake=600";
    check("made", "0@0RND150 1@0E79", 151, lost);
}

#[test]
fn failures_after_clean_exits_have_a_short_grace() {
    let check = |pods: &str, now, expected: Option<u64>| {
        let plan = plan_of(&record("made"), pods, 3, now);
        let is_live = live_attempt(&plan.record).is_some();
        let wake_seconds = plan.wake_seconds.filter(|_| is_live);
        assert_eq!(wake_seconds, expected, "{pods}, {now}");
    };
    check("0@0R 1@0C7 2@0R", 70, Some(3537));
    check("0@0R 1@0C7 2@0E80", 109, Some(1));
    check("0@0R 1@0C7 2@0E80", 110, None);
}
