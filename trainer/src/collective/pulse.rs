//! Where a rank is, as it tells the others, and how long it may stay there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use stoker_api::names::{ENV_SILENCE_SECONDS, ENV_SILENCE_STEPS};

use super::Kind;
use crate::Result;

/// Steps whose median says how long one takes.
const STEPS: usize = 101;
/// Bytes of a beat: step, sums since it, what is done, what the gang does.
pub(super) const BEAT_BYTES: usize = 32;

/// How long a rank may stay where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limits {
    /// At least so long.
    pub(super) silence: Duration,
    /// And so many times as long as a step takes.
    pub(super) steps: f64,
}

impl Limits {
    const SILENCE: Duration = Duration::from_secs(300);
    const STEPS: f64 = 10.0;
    /// Say otherwise: seconds, and a number of steps. 0 seconds: never.
    const ENV_SILENCE: &'static str = ENV_SILENCE_SECONDS;
    const ENV_STEPS: &'static str = ENV_SILENCE_STEPS;

    /// As the environment says.
    ///
    /// # Errors
    ///
    /// It says what is no number.
    pub(super) fn from_environment() -> Result<Self> {
        let number = |name: &str, default: f64| match std::env::var(name) {
            Err(_) => Ok(default),
            Ok(text) => match text.parse::<f64>() {
                Ok(number) if number.is_finite() && (0.0..1e9).contains(&number) => Ok(number),
                _ => Err(format!("{name} is {text:?}, but must be a number")),
            },
        };
        let silence = number(Self::ENV_SILENCE, Self::SILENCE.as_secs_f64())?;
        let steps = number(Self::ENV_STEPS, Self::STEPS)?;
        Ok(Self { silence: Duration::from_secs_f64(silence), steps })
    }

    pub(super) fn limit(&self, step: Duration) -> Option<Duration> {
        let of_steps = Duration::try_from_secs_f64(step.as_secs_f64() * self.steps);
        (!self.silence.is_zero()).then(|| self.silence.max(of_steps.unwrap_or(Duration::MAX)))
    }
}

/// Where this rank is, as it tells the others.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// The step under way, counted from 1; 0 before and after training.
    step: AtomicU64,
    /// Sums and the like since the step began.
    calls: AtomicU64,
    /// What is being done, in the lowest byte, and how often something was done, above it.
    doing: AtomicU64,
    /// How often rank 0 saw somebody move, or wait with reason; the others see it alone.
    gang: AtomicU64,
    /// Whether a rank was asked to leave, as far as is known here.
    is_asked: AtomicBool,
    /// Whether training is over.
    is_resting: AtomicBool,
    /// Whether this process ends with an error.
    has_failed: AtomicBool,
    /// The last batch that a loop of the program's own has reported, and of how many it did.
    reported: AtomicU64,
    reports: AtomicU64,
    /// Nanoseconds in which the loop waited for data.
    data_wait: AtomicU64,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    last: Option<Instant>,
    seconds: VecDeque<f64>,
}

/// What a rank does between its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Doing {
    /// Trains.
    Train = 0,
    /// Validates or predicts.
    Evaluate = 101,
    /// Waits for the storage or for the runner, which have deadlines of their own.
    Wait = 102,
    /// Ends in order.
    Over = 103,
}

impl Pulse {
    /// A step begins.
    pub(crate) fn step(&self, number: u64) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(last) = steps.last.replace(now) {
            steps.seconds.push_back((now - last).as_secs_f64());
            if steps.seconds.len() > STEPS {
                steps.seconds.pop_front();
            }
        }
        self.is_resting.store(false, Ordering::Relaxed);
        self.step.store(number + 1, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.tick(Doing::Train);
    }

    /// Training is over: what the program does now, however long, is not the gang's.
    pub(crate) fn rest(&self) {
        *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = Steps::default();
        self.step.store(0, Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
        self.is_resting.store(true, Ordering::Relaxed);
        self.tick(Doing::Wait);
    }

    /// Whether training is over.
    pub(super) fn is_resting(&self) -> bool {
        self.is_resting.load(Ordering::Relaxed)
    }

    /// Whether a step was whole: before that, data is read and programs are compiled.
    pub(super) fn has_begun(&self) -> bool {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        !steps.seconds.is_empty() || self.reports.load(Ordering::Relaxed) > 1
    }

    /// Something was done, and this comes now.
    pub(crate) fn tick(&self, doing: Doing) {
        self.set(doing as u8);
    }

    fn set(&self, doing: u8) {
        let before = self.doing.load(Ordering::Relaxed);
        let times = (before >> 8).wrapping_add(1) << 8;
        self.doing.store(times | u64::from(doing), Ordering::Relaxed);
    }

    /// A sum or the like begins; those of a pod alone are not counted, as pods may make other ones.
    pub(super) fn enter(&self, kind: Kind, is_of_all: bool) {
        self.calls.fetch_add(u64::from(is_of_all), Ordering::Relaxed);
        self.set(kind as u8);
    }

    /// Bytes move within it.
    pub(super) fn flow(&self) {
        self.doing.fetch_add(1 << 8, Ordering::Relaxed);
    }

    /// The sum or the like is over.
    pub(super) fn leave(&self) {
        self.tick(Doing::Train);
    }

    /// A rank was asked to leave: all ranks hear of it with the next beats.
    pub(crate) fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// Whether a rank was asked to leave, as far as is known here.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    /// The loop has waited for data.
    pub(crate) fn waited_for_data(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.data_wait.fetch_add(nanos, Ordering::Relaxed);
    }

    /// How long the loop has waited for data, in all.
    pub(crate) fn data_wait(&self) -> Duration {
        Duration::from_nanos(self.data_wait.load(Ordering::Relaxed))
    }

    /// A loop of the program's own has reported this batch: it may have no steps that are seen here.
    pub(crate) fn reported(&self, batches: u64) {
        if self.reported.fetch_max(batches, Ordering::Relaxed) < batches {
            self.reports.fetch_add(1, Ordering::Relaxed);
        }
        self.tick(Doing::Train);
    }

    /// What the loop does, for people.
    pub(crate) fn place(&self) -> String {
        let place = self.beat().place();
        match self.reported.load(Ordering::Relaxed) {
            0 => place,
            batches => format!("{place}, has reported batch {batches}"),
        }
    }

    /// This process ends with an error: it says no farewell.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Says farewell, unless this process ends with an error: that its connections end means nothing.
    pub(super) fn part(&self) -> bool {
        let is_well = self.is_well();
        if is_well {
            self.set(Doing::Over as u8);
        }
        is_well
    }

    /// Whether this process does not end with an error.
    pub(super) fn is_well(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed) && !std::thread::panicking()
    }

    /// Rank 0 sees somebody move.
    pub(super) fn gang_moves(&self) {
        self.gang.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn median_step(&self) -> Duration {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seconds: Vec<f64> = steps.seconds.iter().copied().collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or_default();
        Duration::from_secs_f64(median)
    }

    pub(super) fn beat(&self) -> Beat {
        let load = |it: &AtomicU64| it.load(Ordering::Relaxed);
        let (step, calls) = (load(&self.step), load(&self.calls));
        let asked = if self.is_asked() { ASKED } else { 0 };
        Beat { step, calls, doing: load(&self.doing), gang: load(&self.gang) & !ASKED | asked }
    }
}

/// In what a beat says of the gang: that a rank was asked to leave.
const ASKED: u64 = 1 << 63;

/// Where a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Beat {
    step: u64,
    calls: u64,
    doing: u64,
    gang: u64,
}

impl Beat {
    pub(super) fn to_bytes(self) -> [u8; BEAT_BYTES] {
        let mut bytes = [0; BEAT_BYTES];
        for (at, number) in [self.step, self.calls, self.doing, self.gang].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; BEAT_BYTES]) -> Self {
        let number = |at: usize| {
            let mut own = [0; 8];
            own.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
            u64::from_le_bytes(own)
        };
        Self { step: number(0), calls: number(1), doing: number(2), gang: number(3) }
    }

    fn kind(&self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|it| *it as u64 == self.doing & 0xff)
    }

    /// Whether a rank was asked to leave.
    pub(super) fn asks(&self) -> bool {
        self.gang & ASKED != 0
    }

    pub(super) fn is_over(&self) -> bool {
        self.doing & 0xff == Doing::Over as u64
    }

    /// Whether this is in a sum or the like.
    pub(super) fn is_together(&self) -> bool {
        self.kind().is_some()
    }

    pub(super) fn waits(&self) -> bool {
        self.doing & 0xff == Doing::Wait as u64
    }

    /// How far it has come, to be compared.
    pub(super) fn progress(&self) -> (u64, u64, bool) {
        (self.step, self.calls, self.kind().is_some())
    }

    pub(super) fn place(&self) -> String {
        let what = match (self.kind(), self.doing & 0xff) {
            (Some(kind), _) => format!("in {} {}", kind.name(), self.calls),
            (None, doing) if doing == Doing::Evaluate as u64 => "in a validation".into(),
            (None, doing) if doing == Doing::Wait as u64 => {
                "waiting for the storage or the runner".into()
            }
            _ => format!("after {} sums", self.calls),
        };
        match self.step.checked_sub(1) {
            Some(step) => format!("at step {step} {what}"),
            None => format!("before its first step {what}"),
        }
    }
}
