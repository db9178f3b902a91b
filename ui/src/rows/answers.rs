//! Answers whose files are read completely each time, kept for a short time.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{AGE_FACTOR, AGE_MIN, MetricsCache};

/// Maximum number of answers in memory.
const ANSWERS_MAX: usize = 8;

/// Answers by the path of their files, each with the time from which on the files are read again.
#[derive(Debug, Default)]
pub(super) struct Answers {
    by_path: HashMap<String, (Instant, Value)>,
}

impl MetricsCache {
    /// Returns the answer about the files in a directory, if they were read a short time ago.
    pub(crate) fn answer(&self, path: &str) -> Option<Value> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (stale_at, answer) = answers.by_path.get(path)?;
        (Instant::now() < *stale_at).then(|| answer.clone())
    }

    /// Keeps an answer whose files were read in the time `took`.
    pub(crate) fn keep_answer(&self, path: &str, answer: &Value, took: Duration) {
        let now = Instant::now();
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.by_path.retain(|_, (stale_at, _)| now < *stale_at);
        let oldest = answers.by_path.iter().min_by_key(|(_, (stale_at, _))| *stale_at);
        if answers.by_path.len() >= ANSWERS_MAX
            && let Some(oldest) = oldest.map(|(path, _)| path.clone())
        {
            answers.by_path.remove(&oldest);
        }
        let stale_at = now + AGE_MIN.max(took * AGE_FACTOR);
        answers.by_path.insert(path.to_owned(), (stale_at, answer.clone()));
    }
}
