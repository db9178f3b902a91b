//! A small report server on a TCP socket that returns directives and records reports.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use stoker_api::contract::{Directive, Report};

/// Report server.
pub(crate) struct ReportServer {
    pub(crate) url: String,
    pub(crate) reports: Arc<Mutex<Vec<Report>>>,
}

impl ReportServer {
    pub(crate) fn open(answer: impl Fn(&Report) -> Directive + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let reports = Arc::new(Mutex::new(vec![]));
        let log = reports.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut line, mut length) = (String::new(), 0);
                while reader.read_line(&mut line).unwrap_or(0) > 2 {
                    if let Some(value) = line.to_lowercase().strip_prefix("content-length: ") {
                        length = value.trim().parse().unwrap();
                    }
                    line.clear();
                }
                let mut body = vec![0; length];
                // A killed process may leave a partial request.
                if reader.read_exact(&mut body).is_err() || length == 0 {
                    continue;
                }
                let report: Report = serde_json::from_slice(&body).unwrap();
                let text = serde_json::to_string(&answer(&report)).unwrap();
                log.lock().unwrap().push(report);
                let length = text.len();
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}");
                let _ = write!(stream, "{head}\r\nconnection: close\r\n\r\n{text}");
            }
        });
        Self { url, reports }
    }
}
