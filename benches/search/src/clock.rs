//! Processor time, which other processes on the machine hardly change.

use crate::BenchError;

/// Returns the processor time of this thread so far, in seconds.
///
/// # Errors
///
/// The kernel does not report it.
pub(crate) fn processor_time() -> Result<f64, BenchError> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanoseconds / 1e9)
}
