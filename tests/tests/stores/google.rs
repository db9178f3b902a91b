//! A fake of Google Cloud Storage: the part of the XML API that `object_store` uses, as Google
//! documents it (<https://cloud.google.com/storage/docs/xml-api/overview>). Emulators such as
//! fake-gcs-server implement the JSON API and refuse uploads by the XML API.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Service account key with which the client requests no tokens.
pub(super) const KEY: &str = r#"{"private_key": "", "private_key_id": "", "client_email": "",
    "disable_oauth": true}"#;

/// Results of one list request; Google returns up to 1,000.
const PAGE: usize = 5;
/// Minimum size of a part in bytes, except the last part.
const PART_BYTES_MIN: usize = 5 << 20;
const CREATED: &str = "2024-05-01T12:00:00.000Z";
const CREATED_HEADER: &str = "Last-Modified: Wed, 01 May 2024 12:00:00 GMT\r\n";

/// The server. It runs until the process ends.
pub(super) struct FakeGcs {
    pub(super) port: u16,
}

#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<String, Upload>,
    num_uploads: u32,
}

/// An incomplete multipart upload.
struct Upload {
    object: String,
    parts: BTreeMap<u32, Vec<u8>>,
}

struct Request {
    method: String,
    /// Decoded name of the bucket. The object's name is empty in requests for the bucket.
    bucket: String,
    object: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Response {
    status: &'static str,
    headers: String,
    body: Vec<u8>,
}

impl Response {
    fn new(status: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: String::new(), body: body.into() }
    }

    fn with(mut self, headers: &str) -> Self {
        self.headers += headers;
        self
    }

    fn error(status: &'static str, code: &str) -> Self {
        Self::new(status, format!("<?xml version='1.0'?><Error><Code>{code}</Code></Error>"))
    }
}

impl FakeGcs {
    /// Starts a server with one bucket. A second bucket, `forbidden`, refuses every request.
    pub(super) fn start(bucket: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (name, bucket) = (bucket.to_owned(), Arc::new(Mutex::<Bucket>::default()));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (name, bucket) = (name.clone(), bucket.clone());
                std::thread::spawn(move || {
                    // Ignore the error: the client has closed the connection.
                    let _ = serve(&stream, &name, &bucket);
                });
            }
        });
        Self { port }
    }
}

/// Serves the requests of one connection.
fn serve(stream: &TcpStream, name: &str, bucket: &Mutex<Bucket>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader)? {
        let response = match request.bucket.as_str() {
            "forbidden" => Response::error("403 Forbidden", "AccessDenied"),
            bucket if bucket != name => Response::error("404 Not Found", "NoSuchBucket"),
            _ => bucket.lock().unwrap().respond(&request),
        };
        let length = response.body.len();
        let mut stream = stream;
        write!(
            stream,
            "HTTP/1.1 {}\r\n{}Content-Length: {length}\r\n\r\n",
            response.status, response.headers
        )?;
        if request.method != "HEAD" {
            stream.write_all(&response.body)?;
        }
        if request.headers.get("connection").is_some_and(|value| value == "close") {
            break;
        }
    }
    Ok(())
}

/// Reads one request; `None` at the end of the connection.
fn read(reader: &mut BufReader<&TcpStream>) -> std::io::Result<Option<Request>> {
    let mut lines = vec![];
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines[0].split(' ');
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap());
    let headers: BTreeMap<String, String> = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.get("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (bucket, object) = path[1..].split_once('/').unwrap_or((&path[1..], ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let query = pairs.map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        // Queries use form encoding, paths use percent encoding.
        (decoded(&name.replace('+', " ")), decoded(&value.replace('+', " ")))
    });
    let (bucket, object, query) = (decoded(bucket), decoded(object), query.collect());
    Ok(Some(Request { method, bucket, object, query, headers, body }))
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (vec![], text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'%').then(|| std::str::from_utf8(&after[..2]).unwrap());
        match code {
            Some(code) => {
                bytes.push(u8::from_str_radix(code, 16).unwrap());
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn etag(bytes: &[u8]) -> String {
    format!("\"{}\"", stoker_storage::hash::sha256_hex(bytes))
}

/// Returns the headers that describe an object.
fn metadata_headers(bytes: &[u8]) -> String {
    format!("ETag: {}\r\nx-goog-generation: 1\r\n{CREATED_HEADER}", etag(bytes))
}

impl Bucket {
    fn respond(&mut self, request: &Request) -> Response {
        let upload = request.query.get("uploadId");
        match (request.method.as_str(), request.object.is_empty(), upload) {
            ("GET", true, _) => self.list(request),
            ("GET" | "HEAD", false, _) => self.get(request),
            ("PUT", false, None) => self.put(request),
            ("PUT", false, Some(upload)) => self.put_part(request, upload),
            ("POST", false, None) if request.query.contains_key("uploads") => self.begin(request),
            ("POST", false, Some(upload)) => self.complete(request, upload),
            ("DELETE", false, Some(upload)) => match self.uploads.remove(upload) {
                Some(_) => Response::new("204 No Content", ""),
                None => Response::error("404 Not Found", "NoSuchUpload"),
            },
            ("DELETE", false, None) => match self.objects.remove(&request.object) {
                Some(_) => Response::new("204 No Content", ""),
                None => Response::error("404 Not Found", "NoSuchKey"),
            },
            _ => Response::error("405 Method Not Allowed", "MethodNotAllowed"),
        }
    }

    fn list(&self, request: &Request) -> Response {
        let text = |name: &str| request.query.get(name).map_or("", String::as_str);
        if text("list-type") != "2" {
            return Response::error("400 Bad Request", "InvalidArgument");
        }
        let (prefix, delimiter) = (text("prefix"), text("delimiter"));
        let after = match text("continuation-token") {
            "" => text("start-after"),
            token => token,
        };
        // With a delimiter, each directory replaces its objects.
        let mut entries: BTreeMap<String, Option<usize>> = BTreeMap::new();
        for (name, bytes) in &self.objects {
            let Some(rest) = name.strip_prefix(prefix) else { continue };
            let folder = match delimiter {
                "" => None,
                delimiter => rest.split_once(delimiter).map(|(name, _)| name),
            };
            match folder {
                Some(folder) => entries.insert(format!("{prefix}{folder}{delimiter}"), None),
                None => entries.insert(name.clone(), Some(bytes.len())),
            };
        }
        let mut left = entries.into_iter().filter(|(name, _)| name.as_str() > after);
        let (mut xml, mut last) = (String::new(), String::new());
        for (name, size) in left.by_ref().take(PAGE) {
            let key = escaped(&name);
            xml += &match size {
                None => format!("<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"),
                Some(size) => format!(
                    "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>\"1\"</ETag>\
                     <LastModified>{CREATED}</LastModified></Contents>"
                ),
            };
            last = name;
        }
        if left.next().is_some() {
            let token = escaped(&last);
            xml += &format!("<NextContinuationToken>{token}</NextContinuationToken>");
        }
        Response::new("200 OK", format!("<ListBucketResult>{xml}</ListBucketResult>"))
    }

    fn get(&self, request: &Request) -> Response {
        let Some(bytes) = self.objects.get(&request.object) else {
            return Response::error("404 Not Found", "NoSuchKey");
        };
        let Some(range) = request.headers.get("range") else {
            return Response::new("200 OK", bytes.clone()).with(&metadata_headers(bytes));
        };
        let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let start: usize = start.parse().unwrap();
        let end = end.parse().map_or(bytes.len(), |last: usize| bytes.len().min(last + 1));
        if start >= bytes.len() {
            return Response::error("416 Range Not Satisfiable", "InvalidRange");
        }
        let part = bytes[start..end].to_vec();
        let range = format!("Content-Range: bytes {start}-{}/{}\r\n", end - 1, bytes.len());
        Response::new("206 Partial Content", part).with(&metadata_headers(bytes)).with(&range)
    }

    fn put(&mut self, request: &Request) -> Response {
        if !request.headers.contains_key("content-length") {
            return Response::error("411 Length Required", "MissingContentLength");
        }
        self.objects.insert(request.object.clone(), request.body.clone());
        Response::new("200 OK", "").with(&metadata_headers(&request.body))
    }

    fn begin(&mut self, request: &Request) -> Response {
        self.num_uploads += 1;
        let id = format!("upload-{}", self.num_uploads);
        let upload = Upload { object: request.object.clone(), parts: BTreeMap::new() };
        self.uploads.insert(id.clone(), upload);
        let (bucket, key) = (escaped(&request.bucket), escaped(&request.object));
        Response::new(
            "200 OK",
            format!(
                "<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key>\
                 <UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
            ),
        )
    }

    fn put_part(&mut self, request: &Request, upload: &str) -> Response {
        let number = request.query.get("partNumber").and_then(|number| number.parse().ok());
        let Some(number) = number.filter(|number| (1..=10_000).contains(number)) else {
            return Response::error("400 Bad Request", "InvalidArgument");
        };
        let upload = self.uploads.get_mut(upload);
        let Some(upload) = upload.filter(|upload| upload.object == request.object) else {
            return Response::error("404 Not Found", "NoSuchUpload");
        };
        upload.parts.insert(number, request.body.clone());
        Response::new("200 OK", "").with(&format!("ETag: {}\r\n", etag(&request.body)))
    }

    fn complete(&mut self, request: &Request, id: &str) -> Response {
        let Some(upload) = self.uploads.get(id) else {
            return Response::error("404 Not Found", "NoSuchUpload");
        };
        let text = String::from_utf8(request.body.clone()).unwrap();
        let between = |text: &str, tag: &str| {
            let (_, rest) = text.split_once(&format!("<{tag}>"))?;
            Some(rest.split_once(&format!("</{tag}>"))?.0.to_owned())
        };
        let mut bytes = vec![];
        let parts: Vec<&str> = text.split("<Part>").skip(1).collect();
        for (position, part) in parts.iter().enumerate() {
            let number = between(part, "PartNumber").and_then(|number| number.parse().ok());
            let uploaded = number.and_then(|number: u32| upload.parts.get(&number));
            let is_same = |bytes: &&Vec<u8>| between(part, "ETag") == Some(etag(bytes));
            let Some(uploaded) = uploaded.filter(is_same) else {
                return Response::error("400 Bad Request", "InvalidPart");
            };
            if uploaded.len() < PART_BYTES_MIN && position + 1 < parts.len() {
                return Response::error("400 Bad Request", "EntityTooSmall");
            }
            bytes.extend_from_slice(uploaded);
        }
        self.uploads.remove(id);
        let tag = etag(&bytes);
        self.objects.insert(request.object.clone(), bytes);
        let xml = format!(
            "<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        );
        Response::new("200 OK", xml).with("x-goog-generation: 1\r\n")
    }
}
