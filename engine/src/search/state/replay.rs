//! Takes recorded turns in.

use super::{RecordedDraw, SearchState, Turn, Unreadable};
use crate::search::turn::{Event, Step};

impl SearchState {
    /// Takes in a recorded turn, without deciding anything. There are no events if their record was
    /// deleted, and only effects on other trials are left. `created` are the records of the
    /// `Create` steps' trials, in order; the returned turn contains those that were drawn now.
    ///
    /// # Errors
    ///
    /// The turn does not follow from the turns before it.
    pub fn replay(
        &mut self,
        order: u64,
        events: &[Event],
        steps: &[Step],
        mut created: impl Iterator<Item = RecordedDraw>,
    ) -> Result<Turn, Unreadable> {
        let unreadable = |reason| Err(Unreadable { order, reason });
        if order < self.next_order {
            return unreadable("its order is not above that of the turn before it");
        }
        self.next_order = order + 1;
        self.book.set_order(order);
        for event in events {
            if !self.book.accepts(event) {
                return unreadable("its event is unknown, repeated or late");
            }
            self.observe(order, event);
        }
        let mut turn = Turn {
            order,
            events: events.to_vec(),
            steps: steps.to_vec(),
            changes: vec![],
            created: vec![],
            random_words: vec![],
        };
        for step in steps {
            if let Step::Create { units, source, hyperparameters, .. } = step {
                let given = hyperparameters.clone();
                match created.next() {
                    None => return unreadable("a trial that it created is missing"),
                    Some(RecordedDraw::Present { hyperparameters, random_words }) => {
                        self.random.skip_to(random_words);
                        self.sampler.record(Some(&hyperparameters));
                    }
                    Some(RecordedDraw::Deleted { random_words: Some(random_words) }) => {
                        self.random.skip_to(random_words);
                        self.sampler.record(None);
                    }
                    Some(recorded) => {
                        let Some(draw) = self.draw(*units, source.as_ref(), given) else {
                            return unreadable("the space has fewer points than trials");
                        };
                        let is_missing = recorded == RecordedDraw::Missing;
                        self.sampler.record(is_missing.then_some(&draw.hyperparameters));
                        if is_missing {
                            turn.created.push(draw);
                        }
                    }
                }
                turn.random_words.push(self.random.num_words());
            }
            if let Some(reason) = self.refusal(step) {
                return unreadable(reason);
            }
            self.commit(step, &mut turn.changes);
        }
        Ok(turn)
    }

    /// Takes in the creation of a trial whose turn was deleted. Returns `false` if the step is not
    /// possible.
    pub fn adopt(&mut self, create: &Step, drawn: RecordedDraw) -> bool {
        let order = self.next_order;
        let is_adopted =
            self.replay(order, &[], std::slice::from_ref(create), std::iter::once(drawn)).is_ok();
        self.next_order = order;
        is_adopted
    }

    /// Returns why a recorded step cannot be taken in.
    fn refusal(&self, step: &Step) -> Option<&'static str> {
        let is_unknown = |trial: u32| trial >= self.book.next_index();
        match step {
            Step::Continue { trial, .. }
            | Step::PromoteClosed { trial, .. }
            | Step::Pause { trial }
            | Step::Stop { trial }
                if is_unknown(*trial) =>
            {
                Some("a step is about a trial that does not exist")
            }
            Step::Create { group, .. } | Step::StopPaused { group, .. }
                if *group >= self.method.as_dyn().num_groups() =>
            {
                Some("a step is about a bracket that does not exist")
            }
            Step::Reopen { trials } if trials.iter().copied().any(is_unknown) => {
                Some("a step is about a trial that does not exist")
            }
            _ => None,
        }
    }
}
