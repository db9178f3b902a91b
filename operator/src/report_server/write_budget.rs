//! Limits the status writes that the reports of one namespace may cause.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Size of a namespace's write budget, in seconds of the rate. Reports that decide nothing must
/// leave [`RESERVE_SECONDS`] of it.
const BURST_SECONDS: f64 = 3.0;
const RESERVE_SECONDS: f64 = 2.0;
/// Longest delay of a report that decides something. Beyond it, the report is refused for now.
const DELAY_MAX: Duration = Duration::from_secs(5);
/// Longest delay of a report that decides nothing. Such reports alone never delay the others.
const IDLE_DELAY_MAX: Duration = Duration::from_secs(2);
/// Interval between two warnings about one namespace.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// Number of namespaces above which those with an unused budget are dropped.
const NAMESPACES_MAX: usize = 256;

/// Write budgets of all namespaces in this replica.
#[derive(Debug)]
pub(super) struct WriteBudgets {
    per_second: f64,
    budgets: Mutex<HashMap<Arc<str>, Budget>>,
}

/// A write that exceeds its namespace's budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Throttled {
    /// Wait before the write, or before the next try if the write is refused.
    pub(super) wait: Duration,
    pub(super) is_refused: bool,
    /// Whether a warning about the namespace is due.
    pub(super) warns: bool,
}

#[derive(Debug)]
struct Budget {
    /// Writes left. Each delayed write takes one in advance, so writes keep their order of arrival.
    left: f64,
    at: Instant,
    warned_at: Option<Instant>,
}

impl WriteBudgets {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second: per_second.into(), budgets: Mutex::default() }
    }

    /// Sustained rate of a namespace in writes per second.
    pub(super) fn per_second(&self) -> f64 {
        self.per_second
    }

    /// Takes one write from a namespace's budget.
    ///
    /// # Errors
    ///
    /// The write must wait, or is refused for now.
    pub(super) fn take(&self, namespace: &Arc<str>, is_decisive: bool) -> Result<(), Throttled> {
        self.take_at(namespace, is_decisive, Instant::now())
    }

    fn take_at(
        &self,
        namespace: &Arc<str>,
        is_decisive: bool,
        now: Instant,
    ) -> Result<(), Throttled> {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        if budgets.len() >= NAMESPACES_MAX {
            let unused = Duration::from_secs_f64(2.0 * BURST_SECONDS);
            budgets.retain(|_, budget| now.duration_since(budget.at) < unused);
        }
        let full = BURST_SECONDS * self.per_second;
        let new = || Budget { left: full, at: now, warned_at: None };
        let budget = budgets.entry(namespace.clone()).or_insert_with(new);
        let grown = now.duration_since(budget.at).as_secs_f64() * self.per_second;
        (budget.left, budget.at) = ((budget.left + grown).min(full), now);
        let (floor, delay_max) = match is_decisive {
            true => (0.0, DELAY_MAX),
            false => (RESERVE_SECONDS * self.per_second, IDLE_DELAY_MAX),
        };
        let missing = (floor + 1.0 - budget.left).max(0.0);
        let wait = Duration::from_secs_f64(missing / self.per_second);
        let is_refused = wait > delay_max;
        if !is_refused {
            budget.left -= 1.0;
        }
        if wait.is_zero() {
            return Ok(());
        }
        let warns = budget.warned_at.is_none_or(|at| now.duration_since(at) >= WARNING_INTERVAL);
        if warns {
            budget.warned_at = Some(now);
        }
        Err(Throttled { wait, is_refused, warns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result in milliseconds: the delay of the write, or the negative wait before the next try.
    fn delay_ms(budgets: &WriteBudgets, namespace: &str, is_decisive: bool, now: Instant) -> i64 {
        match budgets.take_at(&namespace.into(), is_decisive, now) {
            Ok(()) => 0,
            Err(throttled) => {
                let wait = throttled.wait.as_millis() as i64;
                if throttled.is_refused { -wait } else { wait }
            }
        }
    }

    #[test]
    fn writes_beyond_the_budget_are_delayed_then_refused() {
        let budgets = WriteBudgets::new(10);
        let now = Instant::now();
        let idle: Vec<i64> = (0..32).map(|_| delay_ms(&budgets, "a", false, now)).collect();
        assert_eq!(idle[..10], [0; 10]);
        let delays: Vec<i64> = (1..=20).map(|number| number * 100).collect();
        assert_eq!(idle[10..30], delays);
        assert_eq!(idle[30..], [-2_100; 2]);
        // Reports that decide something may use the reserve.
        assert_eq!(delay_ms(&budgets, "a", true, now), 100);
        let deciding: Vec<i64> = (0..60).map(|_| delay_ms(&budgets, "a", true, now)).collect();
        assert_eq!((deciding[0], deciding[48], deciding[49]), (200, 5_000, -5_100));
        // Another namespace has a separate budget.
        assert_eq!(delay_ms(&budgets, "b", false, now), 0);
        // The budget refills over time, up to its size.
        let later = now + Duration::from_secs(3_600);
        let idle: Vec<i64> = (0..11).map(|_| delay_ms(&budgets, "a", false, later)).collect();
        assert_eq!((idle[9], idle[10]), (0, 100));
    }

    #[test]
    fn reports_without_effect_never_delay_the_others() {
        let budgets = WriteBudgets::new(1);
        let mut now = Instant::now();
        for second in 0..100 {
            let idle: Vec<i64> = (0..10).map(|_| delay_ms(&budgets, "a", false, now)).collect();
            assert!(idle[9] < 0, "second {second}: {idle:?}");
            now += Duration::from_secs(1);
            if second % 2 == 1 {
                assert_eq!(delay_ms(&budgets, "a", true, now), 0, "second {second}");
            }
        }
    }

    #[test]
    fn an_overload_is_logged_once_a_minute() {
        let budgets = WriteBudgets::new(1);
        let start = Instant::now();
        let warns = |seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            let mut all = (0..9).map(|_| budgets.take_at(&"a".into(), false, now));
            all.any(|delay_ms| delay_ms.is_err_and(|throttled| throttled.warns))
        };
        assert_eq!(
            [0, 1, 59, 60, 61, 119, 120].map(warns),
            [true, false, false, true, false, false, true]
        );
    }

    #[test]
    fn unused_budgets_are_dropped() {
        let budgets = WriteBudgets::new(1);
        let now = Instant::now();
        for number in 0..NAMESPACES_MAX {
            delay_ms(&budgets, &number.to_string(), true, now);
        }
        delay_ms(&budgets, "last", true, now + Duration::from_secs(10));
        assert_eq!(budgets.budgets.lock().unwrap().len(), 1);
    }
}
