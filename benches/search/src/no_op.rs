//! Trainer of the part `runner`: reports a result and ends, without training.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use stoker_api::contract::{CONTRACT_VERSION, Directive, Report, ReportEvent, TrialConfig};
use stoker_api::names::ENV_TRIAL_CONFIG;

use crate::{BenchError, space};

/// Reports the beginning, the result and the end of an attempt.
pub(crate) fn train() -> Result<(), BenchError> {
    let path = std::env::var(ENV_TRIAL_CONFIG)?;
    let config: TrialConfig = serde_json::from_slice(&std::fs::read(path)?)?;
    let units = config.units;
    let started = ReportEvent::Started {
        resumed_from: None,
        batches_total: units,
        refused: Default::default(),
    };
    post(&config, 0, started)?;
    let metrics = [("loss".to_owned(), space::metric(config.trial, units).to_string())].into();
    let directive =
        post(&config, units, ReportEvent::Validated { metrics, granted_units: Some(units) })?;
    if directive != Directive::Stop {
        return Err(format!("the answer is {directive:?} instead of stop").into());
    }
    post(&config, units, ReportEvent::Exiting { code: 0, message: None })?;
    Ok(())
}

fn post(config: &TrialConfig, batches: u64, event: ReportEvent) -> Result<Directive, BenchError> {
    let report = Report { version: CONTRACT_VERSION, attempt: config.attempt, batches, event };
    let body = serde_json::to_string(&report)?;
    let token = std::fs::read_to_string(&config.report_endpoint.token_file)?;
    let url = config.report_endpoint.url.strip_prefix("http://").ok_or("the URL is not http")?;
    let (host, path) = url.split_once('/').ok_or("the URL has no path")?;
    let mut stream = TcpStream::connect(host)?;
    write!(
        stream,
        "POST /{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("the answer has no body")?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(format!("{head}: {body}").into());
    }
    Ok(serde_json::from_str(body)?)
}
