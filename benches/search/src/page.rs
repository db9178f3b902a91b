//! Times and memory of the web page with a search of 10,000 trials.

mod browser;
mod latency;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};
use stoker_api::trial::Fact;
use stoker_engine::trial::TrialRecord;

use crate::{BenchError, rebuild, space};

/// Number of trials of the search.
const TRIALS: u32 = 10_000;
const UID: &str = "0badcafe0badcafe0badcafe0badcafe";
const ID: &str = "bench-0badcafe";
/// First second of the search.
const BEGIN: i64 = 1_795_000_000;

/// A running page. Ends with this value.
struct Page {
    process: Child,
    /// The page's first URL, with its token.
    url: String,
    address: String,
    cookie: String,
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Prints the figures.
pub(crate) fn run(
    stoker: &Path,
    browser: Option<&Path>,
    root: Option<&Path>,
    points: u64,
) -> Result<(), BenchError> {
    let temporary = tempfile::tempdir()?;
    let root = root.unwrap_or(temporary.path());
    if !root.join(format!("local/{ID}/record/experiment.json")).exists() {
        write_record(root, points)?;
    }
    println!("page: a search of {TRIALS} trials, {points} points each");
    let begin = Instant::now();
    let page = start(stoker, root)?;
    let base = format!("/experiments/bench/{ID}");
    while page.get(&base)?.0 != 200 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    println!("{:<44} {:>8.0} ms", "start to the first overview", milliseconds(begin));
    let views = [
        ("overview, HTML", base.clone()),
        ("list of experiments, HTML", "/experiments".to_owned()),
        ("trials, first 100 rows, HTML", format!("{base}/trials")),
        ("trials with a filter, HTML", format!("{base}/trials?filter=loss+%3C+0.01&sort=-rate")),
        ("rungs, HTML", format!("{base}/rungs")),
        ("data of all trials, JSON", format!("{base}/data.json")),
        ("curves, first time, JSON", format!("{base}/curves.json?width=900")),
        ("curves, again, JSON", format!("{base}/curves.json?width=900")),
        ("trials, CSV", format!("{base}/trials.csv")),
    ];
    for (name, path) in views {
        let begin = Instant::now();
        let (status, body) = page.get(&path)?;
        let time = milliseconds(begin);
        println!("{name:<44} {time:>8.0} ms {:>9.1} kB", body.len() as f64 / 1e3);
        if status != 200 {
            return Err(format!("{path}: status {status}").into());
        }
    }
    if let Some(packages) = browser {
        browser::measure(&page, packages)?;
    }
    println!("{:<44} {:>8.0} MiB", "peak memory of the server", page.peak_memory()? / 1024.0);
    latency::measure(&page, root)
}

fn milliseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

fn start(stoker: &Path, root: &Path) -> Result<Page, BenchError> {
    let mut command = Command::new(stoker);
    command.args(["ui", "--port", "0", "--output", "json", "--root"]).arg(root);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = command.spawn()?;
    let output = process.stdout.take().ok_or("no output")?;
    let mut page =
        Page { process, url: String::new(), address: String::new(), cookie: String::new() };
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let url = serde_json::from_str::<Value>(&line)?["url"].as_str().unwrap_or("").to_owned();
    let rest = url.strip_prefix("http://").ok_or("no URL")?;
    let (address, token) = rest.split_once("/?token=").ok_or("no token")?;
    let port = address.rsplit(':').next().unwrap_or_default();
    page.cookie = format!("stoker-{port}={token}");
    page.address = address.to_owned();
    page.url = url;
    Ok(page)
}

impl Page {
    /// Sends a request. The stream contains the response.
    fn request(&self, path: &str) -> Result<TcpStream, BenchError> {
        let mut stream = TcpStream::connect(&self.address)?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {}\r\nCookie: {}\r\nConnection: close\r\n\r\n",
            self.address, self.cookie
        )?;
        Ok(stream)
    }

    /// Requests a path. Returns status and body.
    fn get(&self, path: &str) -> Result<(u16, Vec<u8>), BenchError> {
        let mut answer = Vec::new();
        self.request(path)?.read_to_end(&mut answer)?;
        let status = answer.get(9..12).and_then(|text| std::str::from_utf8(text).ok());
        let status = status.and_then(|text| text.parse().ok()).unwrap_or(0);
        let end = b"\r\n\r\n";
        let head = answer.windows(end.len()).position(|bytes| bytes == end).unwrap_or(0);
        Ok((status, answer.get(head + end.len()..).unwrap_or_default().to_vec()))
    }

    /// Returns the greatest resident memory in KiB.
    fn peak_memory(&self) -> Result<f64, BenchError> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        Ok(number.ok_or("the memory is unknown")?)
    }
}

/// Writes record and metrics of a search that has ended, as `stoker run` does.
fn write_record(root: &Path, points: u64) -> Result<(), BenchError> {
    let searcher = json!({"asyncHalving": {"maxTrials": TRIALS, "numRungs": 5}});
    let (records, ..) = rebuild::record(&space::config(&searcher, 1)?)?;
    let folder = root.join(format!("local/{ID}/record"));
    fs::create_dir_all(folder.join("trials"))?;
    let mut best = (f64::INFINITY, 0);
    for (index, record) in &records.trials {
        let value = best_of(record);
        if value < best.0 {
            best = (value, *index);
        }
        fs::write(folder.join(format!("trials/{index}.json")), trial(record, value).to_string())?;
        let path = root.join(format!("bench/{ID}/trials/{index}/metrics"));
        fs::create_dir_all(&path)?;
        fs::write(path.join("0-00000000.jsonl"), rows(*index, value, points))?;
    }
    let experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
        "metadata": {"name": "bench", "namespace": "bench", "uid": UID},
        "spec": space::spec(&searcher, 1),
        "status": {
            "phase": "Completed", "trialsCreated": TRIALS, "trialsClosed": TRIALS,
            "progressPercent": 100, "log": records.log,
            "best": {"index": best.1, "metric": best.0.to_string()},
        },
    });
    Ok(fs::write(folder.join("experiment.json"), experiment.to_string())?)
}

fn best_of(record: &TrialRecord) -> f64 {
    let results = record.status.facts.iter().filter_map(|fact| match fact {
        Fact::Result(result) => result.metric.parse().ok(),
        _ => None,
    });
    results.fold(f64::INFINITY, f64::min)
}

fn trial(record: &TrialRecord, value: f64) -> Value {
    let (index, time) = (record.spec.index, |seconds: i64| {
        json!(stoker_api::time::Timestamp(BEGIN + i64::from(record.spec.index) + seconds))
    });
    let mut status = json!(record.status);
    status["phase"] = "Completed".into();
    status["bestMetric"] = value.to_string().into();
    status["metrics"] = json!({ "loss": value.to_string() });
    status["attempts"] = json!([{
        "number": 0, "end": "Completed", "startedAt": time(0), "endedAt": time(600),
        "hasPods": true,
    }]);
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
        "metadata": {"name": format!("bench-{index}")}, "spec": record.spec, "status": status,
    })
}

/// Returns a noisy curve that ends at `value`.
fn rows(index: u32, value: f64, points: u64) -> String {
    let mut text = String::new();
    for point in 1..=points {
        let share = point as f64 / points as f64;
        let loss = value + (1.0 - share).powi(3) + 0.05 * space::metric(index, point);
        let time = BEGIN as f64 + point as f64;
        text.push_str(&format!(
            "{{\"group\":\"validation\",\"batches\":{point},\"epoch\":0,\"attempt\":0,\
             \"time\":{time},\"metrics\":{{\"loss\":{loss}}}}}\n"
        ));
    }
    text
}
