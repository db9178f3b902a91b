//! Messages that were sent to the user, to repeat none of them too soon.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time after which a message is sent again if nothing has changed.
const NOTE_INTERVAL: Duration = Duration::from_secs(300);

/// Messages to remember. With a full disk, each running trial has a message with its path.
const NOTED_MAX: usize = 1000;

/// Messages of the last minutes, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Noted(VecDeque<(Instant, String)>);

impl Noted {
    /// Returns whether to send a message: not if it was sent recently.
    pub(super) fn is_due(&mut self, text: &str) -> bool {
        self.0.retain(|(at, _)| at.elapsed() < NOTE_INTERVAL);
        if self.0.iter().any(|(_, noted)| noted == text) {
            return false;
        }
        if self.0.len() == NOTED_MAX {
            self.0.pop_front();
        }
        self.0.push_back((Instant::now(), text.to_owned()));
        true
    }
}
