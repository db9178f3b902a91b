//! A page that many viewers share. The server has no permissions: each request to the API server
//! has the token of a viewer.
//!
//! ```text
//!   token --> [account]: reviews of permissions, once a minute -- [secrets]: storage
//!                |
//!              [hub]: a list and a watch per kind and scope, with a permitted viewer's token
//! ```

mod account;
mod added;
mod connect;
mod hub;
mod secrets;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::{Args, ValueEnum};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::PostParams;
use kube::{Api, Client};
use stoker_ui::{Account, Directory, Offer, Refusal, SignIn, Token};

use self::account::ClusterAccount;
use self::added::Added;
use self::hub::Hub;
use self::secrets::Storages;
use crate::cluster::connect::{Cluster, Options, chain};
use crate::failure::Failure;

/// Options of a page that many viewers share.
#[derive(Clone, Debug, Args)]
pub(crate) struct SharedArgs {
    /// Serve many viewers, who see what their tokens allow: `form` asks each viewer for a token of
    /// the cluster, `header` takes the header `Authorization: Bearer TOKEN` of an authenticating
    /// proxy. The credentials of the kubeconfig are not used
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Many viewers",
        conflicts_with_all = ["root", "namespace", "all_namespaces", "storage_url",
            "storage_endpoint"])]
    pub(crate) sign_in: Option<SignInBy>,
    /// Address and port to listen on [default: 127.0.0.1 and the port of --port]
    #[arg(long, value_name = "ADDRESS", help_heading = "Many viewers", requires = "sign_in")]
    pub(crate) listen: Option<SocketAddr>,
    /// Host name in URLs of the page, beside localhost. Repeat it for several
    #[arg(long = "host", value_name = "NAME", help_heading = "Many viewers", requires = "sign_in")]
    hosts: Vec<String>,
    /// Namespaces to check for each viewer who may not list all namespaces. Viewers can add others
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        help_heading = "Many viewers",
        requires = "sign_in"
    )]
    offer_namespaces: Vec<String>,
}

/// Way in which viewers sign in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SignInBy {
    /// Each viewer enters a token.
    Form,
    /// An authenticating proxy sends the token.
    Header,
}

/// Parts that all viewers share.
#[derive(Debug)]
struct Shared {
    /// The cluster, with a client without credentials.
    cluster: Cluster,
    offered: BTreeSet<String>,
    added: Added,
    hub: Arc<Hub>,
    storages: Storages,
}

/// Accepts viewers whom the API server knows.
#[derive(Debug)]
struct ClusterDirectory(Arc<Shared>);

/// Returns the page of a cluster for all who sign in, and its name. Sends no request.
pub(super) async fn offer(
    args: &SharedArgs,
    sign_in: SignInBy,
    options: &Options,
    allows_actions: bool,
) -> Result<(Offer, String), Failure> {
    let cluster = Cluster::connect_without_user(options).await?;
    let place = format!("Cluster at {}, for all who sign in,", cluster.server);
    let shared = Shared {
        cluster,
        offered: args.offer_namespaces.iter().cloned().collect(),
        added: Added::default(),
        hub: Arc::default(),
        storages: Storages::default(),
    };
    let sign_in = match sign_in {
        SignInBy::Form => SignIn::Form,
        SignInBy::Header => SignIn::Header,
    };
    let directory = Arc::new(ClusterDirectory(Arc::new(shared)));
    Ok((Offer { directory, sign_in, hosts: args.hosts.clone(), allows_actions }, place))
}

impl Directory for ClusterDirectory {
    fn sign_in(&self, token: Token) -> BoxFuture<'_, Result<Arc<dyn Account>, Refusal>> {
        async move {
            let client = connect::with_token(&self.0.cluster.client, &token)?;
            let name = user(&client).await?;
            let account = ClusterAccount::new(self.0.clone(), client, name, &token);
            Ok(account as Arc<dyn Account>)
        }
        .boxed()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the name of a client's user. Every authenticated user may ask for it.
async fn user(client: &Client) -> Result<String, Refusal> {
    let api: Api<SelfSubjectReview> = Api::all(client.clone());
    let (params, review) = (PostParams::default(), SelfSubjectReview::default());
    let review = connect::within_limit(api.create(&params, &review)).await?;
    let info = review.status.and_then(|status| status.user_info);
    let name = info.and_then(|info| info.username).filter(|name| !name.is_empty());
    name.ok_or_else(|| Refusal::Token("the API server does not name a user".to_owned()))
}

/// Returns why a request failed: an unaccepted token ends the session.
fn refusal(error: &kube::Error) -> Refusal {
    match error {
        kube::Error::Api(status) if status.code == 401 => Refusal::Token(
            "the API server does not accept the token: it is wrong, or has expired".to_owned(),
        ),
        error => Refusal::Unavailable(format!("cannot ask the API server: {}", chain(error))),
    }
}
