//! Tests of what counts as a stall. The ranks' states have ages, so no test waits.

use std::net::TcpListener;

use super::super::CollectiveOp;
use super::super::progress::RankActivity;
use super::*;

const LIMITS: StallLimits = StallLimits { min: Duration::from_secs(300), steps: 10.0 };

/// Age of a state in seconds: shorter and longer than the limit.
const RECENT: u64 = 0;
const OLD: u64 = 1_000;

fn ago(seconds: u64) -> Instant {
    Instant::now() - Duration::from_secs(seconds)
}

fn stream() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).unwrap()
}

/// Returns a rank that has begun this step, and completed one before.
fn at_step(step: u64) -> ProgressState {
    let progress = ProgressState::default();
    progress.begin_step(step - 1);
    progress.begin_step(step);
    progress
}

/// Returns a rank that waits for the others in its first collective call of this step.
fn in_call(step: u64) -> ProgressState {
    let progress = at_step(step);
    progress.begin_call(CollectiveOp::SumF32, true);
    progress
}

/// A peer whose state has this age, and whose last heartbeat has just arrived.
fn peer(progress: &ProgressState, age: u64) -> PeerState {
    PeerState {
        stream: Some(Arc::new(stream())),
        received: vec![],
        heartbeat: progress.heartbeat(),
        changed_at: ago(age),
        heard_at: Instant::now(),
    }
}

/// Returns why the watchdog of rank `rank` ends its gang, if it does. The rank's state is old.
fn reason(
    rank: usize,
    limits: StallLimits,
    local: ProgressState,
    peers: impl IntoIterator<Item = (usize, PeerState)>,
) -> Option<String> {
    let heartbeat = local.heartbeat();
    let (progress, abort) = (Arc::new(local), GangAbort::default());
    let peers = peers.into_iter().collect();
    let watchdog = Watchdog { rank, limits, progress, abort, peers, is_single: false };
    watchdog.stall_reason(heartbeat, ago(OLD))
}

#[test]
fn rank_that_is_behind_is_blamed() {
    let stalls = |age| [(1, peer(&in_call(7), OLD)), (2, peer(&at_step(7), age))];
    let expected = "no progress for 300 s: rank 2 last seen at step 7 after 0 collective calls; \
                    if a step may take longer, increase STOKER_SILENCE_SECONDS";
    assert_eq!(reason(0, LIMITS, in_call(7), stalls(OLD)).as_deref(), Some(expected));
    assert_eq!(reason(0, LIMITS, in_call(7), stalls(RECENT)), None);
    let off = StallLimits { min: Duration::ZERO, ..LIMITS };
    assert_eq!(reason(0, off, in_call(7), stalls(OLD)), None);
}

/// Returns why the watchdog ends a process without other ranks, if it does. Its state is old.
fn reason_of_single_rank(local: ProgressState) -> Option<String> {
    let (heartbeat, abort) = (local.heartbeat(), GangAbort::default());
    let (progress, peers) = (Arc::new(local), BTreeMap::new());
    let watchdog = Watchdog { rank: 0, limits: LIMITS, progress, abort, peers, is_single: true };
    watchdog.stall_reason(heartbeat, ago(OLD))
}

#[test]
fn single_rank_stalls_only_during_training() {
    let expected = "no progress for 300 s: last seen at step 7; if a step may take longer, \
                    increase STOKER_SILENCE_SECONDS";
    assert_eq!(reason_of_single_rank(at_step(7)).as_deref(), Some(expected));
    let validates = at_step(7);
    validates.record_activity(RankActivity::Evaluate);
    let stalls = reason_of_single_rank(validates).unwrap();
    assert!(stalls.contains("last seen at step 7 in a validation; "), "{stalls}");

    let waits = at_step(7);
    waits.record_activity(RankActivity::Wait);
    let is_over = at_step(7);
    is_over.training_finished();
    // An evaluation after the last length may be reported.
    is_over.record_batches(8);
    is_over.record_batches(9);
    for allowed in [waits, is_over, ProgressState::default()] {
        assert_eq!(reason_of_single_rank(allowed), None);
    }
    // The last rank of a gang blocks no other.
    assert_eq!(reason(0, LIMITS, at_step(7), []), None);
}

#[test]
fn missing_heartbeat_is_a_stall_unless_exited() {
    let mut lost = peer(&at_step(7), OLD);
    lost.heard_at = ago(OLD);
    let expected = "no heartbeat from rank 0 for 305 s: last seen at step 7 after 0 collective \
                    calls";
    assert_eq!(reason(1, LIMITS, at_step(7), [(0, lost)]).as_deref(), Some(expected));
    let mut exited = peer(&at_step(7), OLD);
    (exited.stream, exited.heard_at) = (None, ago(OLD));
    assert_eq!(reason(1, LIMITS, in_call(7), [(0, exited)]), None);
}

#[test]
fn waiting_for_storage_is_not_a_stall() {
    let waits = || {
        let progress = at_step(7);
        progress.record_activity(RankActivity::Wait);
        progress
    };
    assert_eq!(reason(0, LIMITS, waits(), [(1, peer(&in_call(7), OLD))]), None);
    assert_eq!(reason(0, LIMITS, in_call(7), [(1, peer(&waits(), OLD))]), None);
}

#[test]
fn stalls_after_training_are_ignored() {
    let over = || {
        let progress = at_step(7);
        progress.training_finished();
        progress
    };
    assert_eq!(reason(0, LIMITS, over(), [(1, peer(&in_call(7), OLD))]), None);
    assert_eq!(reason(1, LIMITS, at_step(7), [(0, peer(&over(), OLD))]), None);
}

#[test]
fn stalls_before_the_first_step_are_ignored() {
    let in_first_call = || {
        let progress = ProgressState::default();
        progress.begin_call(CollectiveOp::AllGather, true);
        progress
    };
    // Rank 1 reads its data.
    let reads = peer(&ProgressState::default(), OLD);
    assert_eq!(reason(0, LIMITS, in_first_call(), [(1, reads)]), None);
    let waits = peer(&in_first_call(), OLD);
    assert!(reason(0, LIMITS, in_first_call(), [(1, waits)]).is_some());
}

#[test]
fn limit_grows_with_the_step_duration() {
    let of_steps = |steps| StallLimits { min: Duration::from_secs(2), steps };
    let step = Duration::from_millis(400);
    assert_eq!(of_steps(10.0).limit(step), Some(Duration::from_secs(4)));
    assert_eq!(of_steps(1.0).limit(step), Some(Duration::from_secs(2)));
    let slow = || {
        let progress = ProgressState::default();
        progress.begin_step(6);
        std::thread::sleep(Duration::from_millis(10));
        progress.begin_step(7);
        progress.begin_call(CollectiveOp::SumF32, true);
        progress
    };
    let stalls = || [(1, peer(&at_step(7), OLD))];
    assert!(reason(0, LIMITS, slow(), stalls()).is_some());
    // A million steps take at least 10,000 s.
    let long = StallLimits { steps: 1e6, ..LIMITS };
    assert_eq!(reason(0, long, slow(), stalls()), None);
}
