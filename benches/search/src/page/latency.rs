//! Time from a change on disk to the page: of a trial's record, and of a row of metrics.
//!
//! The change is on the page once the live stream has announced it and the data contains it.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{ID, Page, UID, milliseconds};
use crate::BenchError;

/// Number of measured changes.
const ROUNDS: u64 = 20;
/// Time without an event, not even a heartbeat, after which the benchmark fails.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Batches of the first row that is added.
const FIRST_BATCH: u64 = 1_000_000;

/// Measures both times, and prints median and maximum.
pub(super) fn measure(page: &Page, root: &Path) -> Result<(), BenchError> {
    let local = root.join("local");
    let record = local.join(ID).join("record");
    let paths = ["experiment.json", "trials/0.json"].map(|name| record.join(name));
    let [experiment, trial] = [read(&paths[0])?, read(&paths[1])?];
    // The lock of a runner and a live attempt make the page expect changes.
    let lock = File::create(local.join("bench.bench.lock"))?;
    lock.lock()?;
    fs::write(local.join("bench.bench.current"), format!("{UID}\n"))?;
    let mut running = experiment.clone();
    running["status"]["phase"] = "Running".into();
    replace(&paths[0], &running)?;
    let stream = page.request(&format!("/live?e=bench/{ID}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut lines = BufReader::new(stream);
    // The first heartbeat comes at once: from here on, the stream announces changes.
    wait_for(&mut lines, "heartbeat")?;
    results(page, &mut lines, &paths[1], trial.clone())?;
    rows(page, &mut lines, root)?;
    replace(&paths[1], &trial)?;
    replace(&paths[0], &experiment)?;
    Ok(())
}

/// Measures changes of a trial's record: each adds an attempt.
fn results(
    page: &Page,
    lines: &mut BufReader<TcpStream>,
    path: &Path,
    mut trial: Value,
) -> Result<(), BenchError> {
    trial["status"]["phase"] = "Running".into();
    trial["status"]["attempts"] = json!([]);
    let mut times = Vec::new();
    for number in 0..ROUNDS {
        let attempts = trial["status"]["attempts"].as_array_mut().ok_or("no attempts")?;
        attempts.push(json!({ "number": number, "startedAt": "2026-11-24T10:00:00Z" }));
        pause(number);
        let begin = Instant::now();
        replace(path, &trial)?;
        loop {
            wait_for(lines, "change")?;
            let (_, body) = page.get(&format!("/experiments/bench/{ID}/data.json"))?;
            let data: Value = serde_json::from_slice(&body)?;
            if data["trials"]["attempts"][0] == json!(number + 1) {
                break;
            }
        }
        times.push(milliseconds(begin));
    }
    print("recorded result to the page", times);
    Ok(())
}

/// Measures rows that the trial adds to its metrics.
fn rows(page: &Page, lines: &mut BufReader<TcpStream>, root: &Path) -> Result<(), BenchError> {
    let path = root.join(format!("bench/{ID}/trials/0/metrics/0-00000000.jsonl"));
    let before = fs::read_to_string(&path)?;
    let mut text = before.clone();
    let mut times = Vec::new();
    for batch in FIRST_BATCH..FIRST_BATCH + ROUNDS {
        text.push_str(&format!(
            "{{\"group\":\"validation\",\"batches\":{batch},\"epoch\":0,\"attempt\":{},\
             \"time\":1795000000,\"metrics\":{{\"loss\":0.5}}}}\n",
            ROUNDS - 1
        ));
        pause(batch);
        let begin = Instant::now();
        write(&path, text.as_bytes())?;
        loop {
            wait_for(lines, "metrics")?;
            let path = format!("/experiments/bench/{ID}/curves.json?trials=0&width=900");
            let data: Value = serde_json::from_slice(&page.get(&path)?.1)?;
            let x = data["curves"][0]["x"].as_array().and_then(|x| x.last()?.as_f64());
            if x == Some(batch as f64) {
                break;
            }
        }
        times.push(milliseconds(begin));
    }
    write(&path, before.as_bytes())?;
    print("stored row of metrics to the page", times);
    Ok(())
}

/// Waits for a part of a second, so that changes come at all phases of the server's intervals.
fn pause(number: u64) {
    std::thread::sleep(Duration::from_millis(number * 370 % 1000));
}

/// Reads the live stream until an event with this name.
fn wait_for(lines: &mut BufReader<TcpStream>, event: &str) -> Result<(), BenchError> {
    let expected = format!("event: {event}");
    let mut line = String::new();
    while line.trim_end() != expected {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Err("the live stream has ended".into());
        }
    }
    Ok(())
}

fn print(name: &str, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    let (median, max) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{name:<44} {median:>8.0} ms, at most {max:.0} ms");
}

fn read(path: &Path) -> Result<Value, BenchError> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn replace(path: &Path, value: &Value) -> Result<(), BenchError> {
    write(path, value.to_string().as_bytes())
}

/// Replaces a file in one step, as a runner and a trainer do.
fn write(path: &Path, bytes: &[u8]) -> Result<(), BenchError> {
    let temporary = path.with_extension("new");
    fs::write(&temporary, bytes)?;
    Ok(fs::rename(temporary, path)?)
}
