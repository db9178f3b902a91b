//! Profiler: samples the resource usage of this process and its machine during training.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Session;
use crate::collective::ProgressState;
use crate::context::Context;
use crate::metrics::MetricsWriter;
use crate::{Error, Result};

/// Minimum time between two samples.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// How long a dropped profiler waits for each of its two last writes: JSON lines and event file.
const FLUSH_MAX: Duration = Duration::from_secs(2);
/// How long a dropped profiler waits for its thread.
const END_MAX: Duration = Duration::from_secs(6);
/// Size of a page, the unit of `/proc/self/statm`.
const PAGE_BYTES: u64 = 4096;
/// Clock ticks per second, the unit of CPU time in `/proc`.
const TICKS_PER_SECOND: f64 = 100.0;
/// Bytes per mebibyte.
const MEBIBYTE: f64 = (1 << 20) as f64;

/// Samples until dropped. Dropping it stores the last samples.
#[must_use = "a profiler that is dropped at once takes no samples"]
#[derive(Debug)]
pub struct Profiler {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Session<'_> {
    /// Samples this process and its machine every `interval`, at least 0.1 s, until the returned
    /// profiler is dropped:
    ///
    /// - `cpu_percent`: CPU usage of this process, in percent of one core; 200 means two cores
    /// - `memory_mib`: memory held by this process
    /// - `read_mib_per_s`, `written_mib_per_s`: disk throughput of this process
    /// - `step_seconds`: median duration of the last steps; `data_wait_percent`: share of the time
    ///   that the loop waited for data. Only with [`fit`](Context::fit) and
    ///   [`training`](Context::training).
    /// - on the first rank of a machine: `machine_cpu_percent` of all cores,
    ///   `machine_memory_percent`, and network throughput as `received_mib_per_s` and
    ///   `sent_mib_per_s`; for each GPU that `nvidia-smi` lists, `gpu0_percent` and
    ///   `gpu0_memory_mib`
    ///
    /// Each rank writes its own rows in the group `profiler`, in addition to the trial's metrics:
    /// JSON lines in `profiler/`, and a TensorBoard run `profiler-rank-N`. Without storage, the
    /// profiler takes no samples.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot start a thread.
    pub fn profile(&self, interval: Duration) -> Result<Profiler> {
        let interval = interval.max(INTERVAL_MIN);
        let ranks = self.context.distributed();
        let config = &self.context.config;
        let Some((rt, store)) = self.context.io().checkpoint_store() else {
            return Ok(Profiler { end: None, thread: None });
        };
        let new_writer = || {
            let writer =
                MetricsWriter::for_profiler(rt.clone(), store.storage, config, ranks.rank());
            Arc::new(Mutex::new(writer))
        };
        let writer = self.context.io().profiler.get_or_insert_with(new_writer).clone();
        let (context, is_first) = (self.context.clone(), ranks.local_rank() == 0);
        let (end, ended) = channel();
        let thread = std::thread::Builder::new().name("stoker-profiler".into());
        let thread = thread.spawn(move || {
            let mut sampler = Sampler::new(is_first, context.distributed().progress.clone());
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                sample(&context, &mut sampler, &writer);
            }
            sample(&context, &mut sampler, &writer);
            let flushing = lock(&writer).flushing();
            for stored in flushing {
                // Do not let an unavailable storage delay the end of the program.
                let _ = rt.block_on(async { tokio::time::timeout(FLUSH_MAX, stored.wait()).await });
            }
        });
        let thread = thread
            .map_err(|error| Error::from(format!("cannot start the profiler thread: {error}")))?;
        Ok(Profiler { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        drop(self.end.take());
        let end = Instant::now() + END_MAX;
        let Some(thread) = self.thread.take() else { return };
        // If a GPU driver hangs, `nvidia-smi` hangs too. Abandon the thread then.
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// Writes one sample. Ignores errors: a missing sample is no reason to end a training.
fn sample(context: &Context, sampler: &mut Sampler, writer: &Mutex<MetricsWriter>) {
    let batches = context.io().batches;
    let metrics = sampler.sample();
    let _ = lock(writer).row("profiler", batches, 0, &metrics);
}

/// Ignores poisoning: rows can be written after a panic elsewhere.
fn lock(writer: &Mutex<MetricsWriter>) -> MutexGuard<'_, MetricsWriter> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// System counters, which only grow.
#[derive(Clone, Debug, Default, PartialEq)]
struct Counters {
    /// CPU seconds of this process.
    cpu: f64,
    read: u64,
    written: u64,
    /// CPU ticks of all cores of the machine: busy, and in total.
    machine_busy: u64,
    machine_all: u64,
    received: u64,
    sent: u64,
    data_wait: Duration,
}

#[derive(Debug)]
struct Sampler {
    is_first: bool,
    progress: Arc<ProgressState>,
    has_gpus: bool,
    last: (Instant, Counters),
}

impl Sampler {
    fn new(is_first: bool, progress: Arc<ProgressState>) -> Self {
        let last = (Instant::now(), Counters::read(&progress));
        Self { is_first, progress, has_gpus: is_first, last }
    }

    fn sample(&mut self) -> BTreeMap<String, f64> {
        let now = (Instant::now(), Counters::read(&self.progress));
        let seconds = (now.0 - self.last.0).as_secs_f64();
        let mut metrics = rates(&self.last.1, &now.1, seconds, self.is_first);
        self.last = now;
        let mut put = |name: &str, value: f64| metrics.insert(name.to_owned(), value);
        if let Some(pages) = second_number(&text("/proc/self/statm")) {
            put("memory_mib", (pages * PAGE_BYTES) as f64 / MEBIBYTE);
        }
        let step = self.progress.median_step();
        if !step.is_zero() {
            put("step_seconds", step.as_secs_f64());
        }
        if let (true, Some(percent)) = (self.is_first, memory_percent(&text("/proc/meminfo"))) {
            put("machine_memory_percent", percent);
        }
        if self.has_gpus {
            match gpus() {
                Some(table) => metrics.extend(gpu_metrics(&table)),
                // No GPUs, or no `nvidia-smi`.
                None => self.has_gpus = false,
            }
        }
        metrics
    }
}

impl Counters {
    fn read(progress: &ProgressState) -> Self {
        let io = text("/proc/self/io");
        let (machine_busy, machine_all) = machine_ticks(&text("/proc/stat")).unwrap_or_default();
        let (received, sent) = network_bytes(&text("/proc/net/dev"));
        Self {
            cpu: process_ticks(&text("/proc/self/stat")).unwrap_or_default() as f64
                / TICKS_PER_SECOND,
            read: field(&io, "read_bytes:").unwrap_or_default(),
            written: field(&io, "write_bytes:").unwrap_or_default(),
            machine_busy,
            machine_all,
            received,
            sent,
            data_wait: progress.data_wait(),
        }
    }
}

/// Returns the metrics between two counter readings.
fn rates(before: &Counters, now: &Counters, seconds: f64, is_first: bool) -> BTreeMap<String, f64> {
    let seconds = seconds.max(1e-3);
    let mib_per_s = |before: u64, now: u64| now.saturating_sub(before) as f64 / MEBIBYTE / seconds;
    let mut metrics = BTreeMap::from([
        ("cpu_percent".to_owned(), (now.cpu - before.cpu).max(0.0) / seconds * 100.0),
        ("read_mib_per_s".to_owned(), mib_per_s(before.read, now.read)),
        ("written_mib_per_s".to_owned(), mib_per_s(before.written, now.written)),
    ]);
    let waited = now.data_wait.saturating_sub(before.data_wait).as_secs_f64();
    metrics.insert("data_wait_percent".to_owned(), (waited / seconds * 100.0).min(100.0));
    if is_first {
        let all = now.machine_all.saturating_sub(before.machine_all).max(1);
        let busy = now.machine_busy.saturating_sub(before.machine_busy);
        metrics.insert("machine_cpu_percent".to_owned(), busy as f64 / all as f64 * 100.0);
        metrics.insert("received_mib_per_s".to_owned(), mib_per_s(before.received, now.received));
        metrics.insert("sent_mib_per_s".to_owned(), mib_per_s(before.sent, now.sent));
    }
    metrics
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn second_number(text: &str) -> Option<u64> {
    text.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

/// Returns user and system CPU ticks from `/proc/self/stat`. The process name may contain spaces.
fn process_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(number(11)? + number(12)?)
}

/// Returns busy and total ticks of all cores from the first line of `/proc/stat`.
fn machine_ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> =
        line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    // User time already includes guest time.
    let all: u64 = ticks.iter().take(8).sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((all - idle, all))
}

/// Returns bytes received and sent on all devices in `/proc/net/dev` except the loopback.
fn network_bytes(table: &str) -> (u64, u64) {
    let (mut received, mut sent) = (0, 0);
    for line in table.lines() {
        let Some((device, numbers)) = line.split_once(':') else { continue };
        let numbers: Vec<u64> =
            numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        if device.trim() != "lo" && numbers.len() >= 9 {
            received += numbers[0];
            sent += numbers[8];
        }
    }
    (received, sent)
}

fn memory_percent(table: &str) -> Option<f64> {
    let (total, available) = (field(table, "MemTotal:")?, field(table, "MemAvailable:")?);
    (total > 0).then(|| total.saturating_sub(available) as f64 / total as f64 * 100.0)
}

/// Returns one line per GPU: its index, its utilization in percent, and MiB of memory in use.
fn gpus() -> Option<String> {
    let query = ["--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi").args(query).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn gpu_metrics(table: &str) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    for line in table.lines() {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [index, percent, memory] = cells[..] else { continue };
        // Partitioned GPUs do not report all values.
        for (name, value) in [("percent", percent), ("memory_mib", memory)] {
            if let Ok(value) = value.parse() {
                metrics.insert(format!("gpu{index}_{name}"), value);
            }
        }
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_tables_are_parsed() {
        let stat = "123 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        assert_eq!(process_ticks(stat), Some(300));
        assert_eq!(process_ticks("nothing"), None);
        let stat = "cpu  100 0 50 800 50 0 0 0 10 0\ncpu0 1 2 3";
        assert_eq!(machine_ticks(stat), Some((150, 1000)));
        let table = "Inter-| Receive\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0\n  \
                     eth0: 100 1 0 0 0 0 0 0 40 0\n eth1:1 1 0 0 0 0 0 0 2 0\n";
        assert_eq!(network_bytes(table), (101, 42));
        let table = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n";
        assert_eq!(memory_percent(table), Some(75.0));
        assert_eq!(field("rchar: 5\nread_bytes: 7\n", "read_bytes:"), Some(7));
        let gpus = gpu_metrics("0, 87, 40536\n1, [N/A], 12\nnonsense\n");
        let expected =
            [("gpu0_memory_mib", 40536.0), ("gpu0_percent", 87.0), ("gpu1_memory_mib", 12.0)];
        assert_eq!(gpus, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }

    #[test]
    fn rates_cover_the_time_between_samples() {
        let before = Counters::default();
        let now = Counters {
            cpu: 3.0,
            read: 4 << 20,
            written: 1 << 20,
            machine_busy: 30,
            machine_all: 40,
            received: 2 << 20,
            sent: 0,
            data_wait: Duration::from_millis(500),
        };
        let metrics = rates(&before, &now, 2.0, true);
        let expected = [
            ("cpu_percent", 150.0),
            ("data_wait_percent", 25.0),
            ("machine_cpu_percent", 75.0),
            ("read_mib_per_s", 2.0),
            ("received_mib_per_s", 1.0),
            ("sent_mib_per_s", 0.0),
            ("written_mib_per_s", 0.5),
        ];
        assert_eq!(metrics, expected.map(|(name, value)| (name.to_owned(), value)).into());
        assert_eq!(rates(&before, &now, 2.0, false).len(), 4);
    }
}
