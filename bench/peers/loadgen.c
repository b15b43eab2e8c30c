// loadgen: closed-loop HTTP/1.1 keep-alive load for /v1/chat/completions.   cc -O2 -o loadgen loadgen.c
// usage: loadgen PORT CONC SECONDS STREAM(0/1) NCHUNKS INTERVAL_US [--key KEY]   -> one JSON line
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <errno.h>
#include <time.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <fcntl.h>
#define NS 4000000
typedef struct { int fd,state,chunked,close_; long clen,got; char hdr[8192]; int hl; long csz; int cstate; int m; int inat; long long ts; long long t0,tf; int evs; } conn;
static long long now(){ struct timespec t; clock_gettime(CLOCK_MONOTONIC,&t); return t.tv_sec*1000000000LL+t.tv_nsec; }
static float *L,*T,*D; static long nL,nT,nD; static long done,events,errs,bytes; static int port,conc,stream_; static char req[2048]; static int rl; static int ep; static conn*cs; static int stop;
static int cmp(const void*a,const void*b){ float x=*(float*)a,y=*(float*)b; return x<y?-1:x>y; }
static void dial(conn*c){ c->fd=socket(AF_INET,SOCK_STREAM,0); int one=1; setsockopt(c->fd,IPPROTO_TCP,TCP_NODELAY,&one,sizeof one); struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port),.sin_addr.s_addr=htonl(INADDR_LOOPBACK)}; if(connect(c->fd,(void*)&a,sizeof a)){perror("connect");exit(1);} struct epoll_event e={.events=EPOLLIN,.data.ptr=c}; epoll_ctl(ep,EPOLL_CTL_ADD,c->fd,&e); }
static void fire(conn*c){ c->state=0;c->hl=0;c->got=0;c->clen=-1;c->chunked=0;c->cstate=0;c->csz=0;c->m=0;c->inat=0;c->evs=0;c->tf=0;c->close_=0; c->t0=now(); if(send(c->fd,req,rl,MSG_NOSIGNAL)!=rl){ close(c->fd); dial(c); send(c->fd,req,rl,MSG_NOSIGNAL);} }
static void body(conn*c,const char*b,long n,long long t){ static const char pat[]="data: "; for(long i=0;i<n;i++){ char ch=b[i]; if(c->inat){ if(ch=='@'){ c->inat=0; if(nD<NS) D[nD++]=(t-c->ts)/1e3; } else if(ch>='0'&&ch<='9') c->ts=c->ts*10+(ch-'0'); else c->inat=0; } else if(ch=='@'){ c->inat=1; c->ts=0; }
   if(ch==pat[c->m]){ if(++c->m==6){ c->m=0; c->evs++; events++; if(!c->tf){ c->tf=t; if(nT<NS) T[nT++]=(t-c->t0)/1e3; } } } else c->m=(ch=='d'); } }
static void fin(conn*c,long long t,int ok){ if(ok){ done++; if(nL<NS) L[nL++]=(t-c->t0)/1e3; } else errs++; if(!ok||c->close_){ close(c->fd); if(!stop) dial(c);} if(!stop) fire(c); else c->state=9; }
static void feed(conn*c,char*b,long n,long long t){ long i=0; while(i<n){ if(c->state==0){ while(i<n){ if(c->hl<8190) c->hdr[c->hl++]=b[i]; i++; if(c->hl>=4&&!memcmp(c->hdr+c->hl-4,"\r\n\r\n",4)){ c->hdr[c->hl]=0; char*p=strcasestr(c->hdr,"content-length:"); if(p) c->clen=atol(p+15); if(strcasestr(c->hdr,"transfer-encoding: chunked")) c->chunked=1; if(strcasestr(c->hdr,"connection: close")) c->close_=1; if(memcmp(c->hdr+9,"200",3)){ static int sh=0; if(!sh++) fprintf(stderr,"bad status: %.200s\n",c->hdr); errs++; } c->state=1; break; } } }
   else if(c->chunked){ if(c->cstate==0){ char ch=b[i++]; if(ch=='\n'){ c->cstate=c->csz?1:3; } else if(ch=='\r'){} else { int v=ch>='0'&&ch<='9'?ch-'0':(ch|32)>='a'&&(ch|32)<='f'?(ch|32)-'a'+10:-1; if(v>=0) c->csz=c->csz*16+v; } }
     else if(c->cstate==1){ long k=n-i<c->csz?n-i:c->csz; body(c,b+i,k,t); i+=k; c->csz-=k; if(!c->csz) c->cstate=2; }
     else if(c->cstate==2){ if(b[i++]=='\n') c->cstate=0; }
     else { if(b[i++]=='\n'){ fin(c,t,1); return; } } }
   else if(c->clen>=0){ long k=n-i; body(c,b+i,k,t); c->got+=k; i+=k; if(c->got>=c->clen){ fin(c,t,1); return; } }
   else { body(c,b+i,n-i,t); i=n; } }
  if(c->state==1&&!c->chunked&&c->clen==0) fin(c,t,1); }
static void pr(const char*k,float*a,long n){ if(!n){ printf(",\"%s_p50\":null,\"%s_p99\":null",k,k); return;} qsort(a,n,sizeof(float),cmp); printf(",\"%s_p50\":%.1f,\"%s_p99\":%.1f",k,a[n/2],k,a[(long)(n*0.99)]); }
int main(int argc,char**argv){ port=atoi(argv[1]);conc=atoi(argv[2]);double secs=atof(argv[3]);stream_=atoi(argv[4]);int nch=atoi(argv[5]);long iv=atol(argv[6]); const char*key=argc>8&&!strcmp(argv[7],"--key")?argv[8]:"sk-bench-1234"; L=malloc(4L*NS);T=malloc(4L*NS);D=malloc(4L*NS);
 char b[1024]; int bl=sprintf(b,"{\"model\":\"fake\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},{\"role\":\"user\",\"content\":\"Tell me about the history of distributed computing in one paragraph please.\"}],\"max_tokens\":%d,\"seed\":%ld,\"stream\":%s}",nch,iv,stream_?"true":"false");
 rl=sprintf(req,"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",port,key,bl,b);
 ep=epoll_create1(0); cs=calloc(conc,sizeof(conn)); long long t0=now(),end=t0+(long long)(secs*1e9); for(int i=0;i<conc;i++){ dial(&cs[i]); fire(&cs[i]); } struct epoll_event ev[256]; static char buf[262144]; long long hard=end+20000000000LL;
 long long tlast=t0; for(;;){ long long t=now(); if(t>=end) stop=1; int live=0; if(stop){ for(int i=0;i<conc;i++) live+=cs[i].state!=9; if(!live||t>hard) break; } int n=epoll_wait(ep,ev,256,50); for(int k=0;k<n;k++){ conn*c=ev[k].data.ptr; ssize_t r=recv(c->fd,buf,sizeof buf,MSG_DONTWAIT); t=now(); tlast=t; if(r<0){ if(errno==EAGAIN) continue; fin(c,t,0); continue;} if(r==0){ fin(c,t,c->state==1&&!c->chunked&&c->clen<0); continue;} bytes+=r; feed(c,buf,r,t);} }
 double el=(tlast-t0)/1e9; printf("{\"rps\":%.1f,\"cps\":%.1f,\"done\":%ld,\"events\":%ld,\"errs\":%ld,\"secs\":%.2f,\"MBps\":%.1f",done/el,events/el,done,events,errs,el,bytes/el/1e6); pr("lat",L,nL); pr("ttft",T,nT); pr("oneway",D,nD); printf("}\n"); }
