//! Records that do not follow from the turns before them.

use super::*;

#[test]
fn turns_that_do_not_follow_are_unreadable() {
    let check = |order: u64, events: &[Event], step: Step, expected: &str| {
        let mut search = random();
        search.advance(Event::Began);
        let drawn = std::iter::once(RecordedDraw::Deleted { random_words: Some(20) });
        let result = search.replay(order, events, std::slice::from_ref(&step), drawn);
        let reason = result.err().map_or("", |error| error.reason);
        assert_eq!(reason, expected, "{order} {events:?} {step:?}");
    };
    let stop = |trial: u32| Step::Stop { trial };
    check(0, &[], stop(0), "its order is not above that of the turn before it");
    check(1, &[], stop(0), "");
    check(9, &[], stop(1), "");
    check(1, &[Event::Began], stop(0), "its event is unknown, repeated or late");
    let trial = "a step is about a trial that does not exist";
    check(1, &[], stop(2), trial);
    check(1, &[], Step::Pause { trial: 2 }, trial);
    check(1, &[], Step::Continue { trial: 2, units: 9 }, trial);
    check(1, &[], Step::PromoteClosed { trial: 2, units: 9 }, trial);
    check(1, &[], Step::Reopen { trials: vec![0, 2] }, trial);
    let create = |group| Step::Create { group, units: 9, source: None, hyperparameters: None };
    check(1, &[], create(0), "");
    let bracket = "a step is about a bracket that does not exist";
    check(1, &[], create(1), bracket);
    check(1, &[], Step::StopPaused { group: 1, units: 9, except: vec![] }, bracket);
}
